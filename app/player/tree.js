// Painting of one draft tree as SVG, and the same data as a table.

const confuTree = (({ el, svg, token }, layout, story) => {
  const CLIP = 14;
  const SIGNS = { accepted: "✓", rejected: "✗", "not reached": "·", pending: "…" };

  /** The word of a state as the page shows it in a phase: nothing is decided before `accept`. */
  function shownState(record, node, phase) {
    if (node === 0) return "root";
    if (phase < 3) return "pending";
    return record.tree.states[node];
  }

  /** The figures on a node: while drafting the draft's probability, in the check the target's own, and
   * from then on both where they led to an acceptance. */
  function caption(record, node, phase) {
    if (node === 0) return "";
    const draft = layout.percent(record.tree.draft_probs[node]);
    const target = layout.percent(record.tree.target_probs[node]);
    if (phase === 2) return target;
    return phase > 2 && record.tree.states[node] === "accepted" ? `${draft}→${target}` : draft;
  }

  // Measured with the longest caption that a node ever shows, so that phases move nothing.
  function plan(record, options) {
    const bonus = story.bonusOf(record);
    const name = (text) => layout.visible(text, CLIP);
    const dot = record.contemplated.length ? " " : ""; // room for the contemplate token's sign
    return layout.place(record.tree, {
      path: record.path,
      bonus: bonus && { lines: [`◆ ${name(bonus.text)}`, bonusShare(record)] },
      rows: options.rows,
      open: options.open,
      keep: options.keep,
      outline: options.outline,
      lines: (node) => [`✓ ${name(record.tree.texts[node])}${dot}`, caption(record, node, 4)],
    });
  }

  function bonusShare(record) {
    const last = story.lastOf(record);
    return record.tree.choice_probs.length ? layout.percent(record.tree.choice_probs[last]) : "";
  }

  /** The two lines of a node; in an outline they stand on one line. */
  function label(box, first, second, outline) {
    const x = box.x + layout.PAD;
    const centred = !outline && !second;
    const text = svg("text", { x, y: box.y + (centred ? 21 : 15), class: "cfx-label" });
    for (const [kind, piece] of first) text.append(svg("tspan", { class: `cfx-${kind}`, text: piece }));
    if (second) {
      const place = outline ? { dx: 6 } : { x, dy: 14 };
      text.append(svg("tspan", { class: "cfx-caption", text: second, ...place }));
    }
    return text;
  }

  function tokenParts(text) {
    return layout
      .clippedParts(text, CLIP)
      .map((part) => [part.kind === "mark" ? "mark" : "word", part.text]);
  }

  /**
   * Draw into `host` (emptied first). scene: record, phase, plan, say, id, successor (the node whose
   * contemplate token became the next future token, or null), kept (Set or null: nodes of a smaller
   * budget), guess (Set of predicted nodes).
   */
  function paint(host, scene) {
    const { record, phase, plan: drawing } = scene;
    const { boxes, edges } = drawing;
    const tree = record.tree;
    const stateOf = (box) =>
      box.kind === "bonus" ? "target" : box.kind === "fold" ? "fold" : shownState(record, box.node, phase);
    const size = { width: Math.ceil(drawing.width), height: drawing.height };
    const canvas = svg("svg", {
      ...size,
      viewBox: `0 0 ${size.width} ${size.height}`,
      class: `cfx-tree cfx-phase-${phase}`,
      role: "presentation",
    });
    const lines = svg("g", { "aria-hidden": "true" });
    // Accepted edges last, so that they lie on top.
    const weight = (edge) => (stateOf(boxes[edge.to]) === "accepted" ? 1 : 0);
    for (const edge of [...edges].sort((a, b) => weight(a) - weight(b))) {
      const to = boxes[edge.to];
      if (to.kind === "bonus" && phase < 3) continue;
      const share = to.kind === "node" ? tree.draft_probs[to.node] : 0.2;
      lines.append(
        svg("path", {
          d: layout.edgePath(boxes[edge.from], to, drawing.outline),
          class: `cfx-edge cfx-is-${stateOf(to).replace(" ", "-")}`,
          "stroke-width": (1 + 4 * share).toFixed(2),
          style: `--depth:${to.depth}`,
        }),
      );
    }
    canvas.append(lines);
    for (const box of boxes) {
      if (box.kind === "bonus" && phase < 3) continue;
      canvas.append(paintBox(box, stateOf(box), scene));
    }
    host.replaceChildren(canvas);
  }

  function paintBox(box, state, scene) {
    const { record, phase, say } = scene;
    const { tree } = record;
    const { outline } = scene.plan;
    const name = box.kind === "node" ? box.node : box.kind;
    const classes = ["cfx-node", `cfx-is-${state.replace(" ", "-")}`];
    if (scene.kept && box.kind === "node" && !scene.kept.has(box.node)) classes.push("cfx-cut");
    if (scene.guess && box.kind === "node" && scene.guess.has(box.node)) classes.push("cfx-guess");
    const group = svg("g", {
      class: classes.join(" "),
      "data-node": name,
      "data-at": box.kind === "fold" ? box.node : null,
      id: `${scene.id}-${box.kind === "fold" ? `fold${box.node}` : name}`,
      role: "treeitem",
      "aria-level": box.depth + 1,
      "aria-selected": "false",
      "aria-label": spoken(box, scene),
      style: `--depth:${box.depth}`,
    });
    const frame = { x: box.x, y: box.y, width: box.width, height: box.height, rx: box.kind === "fold" ? 7 : 10 };
    group.append(svg("rect", { ...frame, class: "cfx-frame" }));
    if (state === "target") {
      const inner = { x: box.x + 2.5, y: box.y + 2.5, width: box.width - 5, height: box.height - 5 };
      group.append(svg("rect", { ...inner, rx: 8, class: "cfx-inner" }));
    }
    if (box.kind === "fold") {
      const text = { x: box.x + box.width / 2, y: box.y + 11.5, "text-anchor": "middle", text: `+${box.count}` };
      group.append(svg("text", { ...text, class: "cfx-label" }));
      group.append(svg("title", { text: say("tree.unfold", { n: box.count }) }));
    } else if (box.kind === "bonus") {
      const own = story.bonusOf(record);
      group.append(label(box, [["sign", "◆ "], ...tokenParts(own.text)], bonusShare(record), outline));
    } else {
      const sign = box.node === 0 ? "◆" : SIGNS[state];
      const first = [["sign", `${sign} `], ...tokenParts(tree.texts[box.node])];
      group.append(label(box, first, caption(record, box.node, phase), outline));
      const carried = contemplation(record, box.node, phase, scene.successor);
      if (carried) {
        // On one line the count of folded nodes has the corner.
        const [right, top] = outline ? [box.folds ? layout.BADGE + 3 : 9, box.height / 2] : [8, 10];
        const dot = { cx: box.x + box.width - right, cy: box.y + top, r: 3 };
        group.append(svg("circle", { ...dot, class: `cfx-dot cfx-dot-${carried}` }));
      }
    }
    return group;
  }

  /** What a node's contemplate token came to: "source" (of the next future token), "carried", or
   * null if it carried none. Contemplate tokens ride in the target's pass: before it there is none. */
  function contemplation(record, node, phase, successor) {
    if (phase < 2 || !record.contemplated.includes(node)) return null;
    return phase >= 3 && node === successor ? "source" : "carried";
  }

  /** Mark the selected node and its twin (numbers, "bonus" or null) in the picture as it stands. */
  function mark(host, id, selected, twin) {
    for (const old of host.querySelectorAll(".cfx-node.cfx-selected, .cfx-node.cfx-twin")) {
      old.classList.remove("cfx-selected", "cfx-twin");
      old.setAttribute("aria-selected", "false");
    }
    const find = (node) => (node === null ? null : host.querySelector(`#${id}-${node}`));
    const chosen = find(selected);
    if (chosen) {
      chosen.classList.add("cfx-selected");
      chosen.setAttribute("aria-selected", "true");
      host.setAttribute("aria-activedescendant", chosen.id);
    } else host.removeAttribute("aria-activedescendant");
    const other = find(twin);
    if (other) other.classList.add("cfx-twin");
  }

  function spoken(box, scene) {
    const { record, phase, say } = scene;
    if (box.kind === "fold") return say("tree.unfold", { n: box.count });
    if (box.kind === "bonus") {
      return say("tree.spoken_bonus", {
        token: layout.visible(story.bonusOf(record).text, 60),
        target: bonusShare(record),
      });
    }
    if (box.node === 0) return say("tree.spoken_root", { token: layout.visible(record.tree.texts[0], 60) });
    const carried = contemplation(record, box.node, phase, scene.successor);
    const words = say("tree.spoken", {
      token: layout.visible(record.tree.texts[box.node], 60),
      draft: layout.percent(record.tree.draft_probs[box.node]),
      target: phase < 2 ? "–" : layout.percent(record.tree.target_probs[box.node]),
      state: say(`state.${shownState(record, box.node, phase).replace(" ", "_")}`),
    });
    return carried ? `${words}, ${say(`contemplate.${carried}`)}` : words;
  }

  /** The tree as a table: the same data for readers who do not see it. */
  function table(record, phase, say, successor) {
    const tree = record.tree;
    const head = ["node", "depth", "parent", "token", "draft", "score", "target", "state"];
    const contemplates = record.contemplated.length > 0;
    const about = (node) => {
      const carried = contemplation(record, node, phase, successor);
      return contemplates && el("td", { text: carried ? say(`contemplate.${carried}`) : "–" });
    };
    if (contemplates) head.push("contemplate");
    const rows = tree.token_ids.map((_, node) =>
      el(
        "tr",
        { class: `cfx-row-${shownState(record, node, phase).replace(" ", "-")}` },
        el("td", { text: node }),
        el("td", { text: tree.depths[node] }),
        el("td", { text: node === 0 ? "–" : tree.parents[node] }),
        el("td", {}, token(tree.texts[node], 40)),
        el("td", { text: node === 0 ? "–" : layout.percent(tree.draft_probs[node]) }),
        el("td", { text: tree.scores[node].toFixed(2) }),
        el("td", { text: node === 0 || phase < 2 ? "–" : layout.percent(tree.target_probs[node]) }),
        el("td", { text: say(`state.${shownState(record, node, phase).replace(" ", "_")}`) }),
        about(node),
      ),
    );
    const own = phase >= 3 && story.bonusOf(record);
    if (own) {
      rows.push(
        el(
          "tr",
          { class: "cfx-row-target" },
          el("td", { text: "◆" }),
          el("td", { text: record.path.length + 1 }),
          el("td", { text: story.lastOf(record) }),
          el("td", {}, token(own.text, 40)),
          el("td", { text: "–" }),
          el("td", { text: "–" }),
          el("td", { text: bonusShare(record) || "–" }),
          el("td", { text: say("state.target") }),
          contemplates && el("td", { text: "–" }),
        ),
      );
    }
    return el(
      "table",
      { class: "cfx-table" },
      el("thead", {}, el("tr", {}, ...head.map((key) => el("th", { scope: "col", text: say(`table.${key}`) })))),
      el("tbody", {}, ...rows),
    );
  }

  return { paint, mark, plan, table, shownState, bonusShare, contemplation };
})(confuDom, confuLayout, confuStory);
