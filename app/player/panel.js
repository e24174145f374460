// One lane's panel: its text, what happened in the round, the tree, and the smaller-tree question.

const confuPanel = (({ el, token, sign, sentence, memory }, layout, story, tree, chips) => {
  const ROWS = 11; // of the folded tree
  const OUTLINE_ROWS = 16; // in the outline of narrow pages a row is a single line
  const PHASES = ["draft", "check", "accept", "append"];

  function create(stage, lane) {
    const { state } = stage;
    const { view } = state;
    const say = stage.say;
    const text = chips.create(stage, lane);
    const id = `cfx-${lane.name}`;
    const part = {
      gain: el("span", { class: "cfx-gain" }),
      solo: el("button", { type: "button", class: "cfx-small", onclick: () => { view.solo = view.solo === lane.name ? null : lane.name; stage.invalidate(); } }),
      expand: el("button", { type: "button", class: "cfx-small", onclick: () => { if (!view.expanded.delete(lane.name)) view.expanded.add(lane.name); stage.invalidate(); } }),
      story: el("p", { class: "cfx-story" }),
      canvas: el("div", { class: "cfx-canvas", tabindex: "0", "data-lane": lane.name }),
      why: el("p", { class: "cfx-why" }),
      range: el("input", { type: "range", min: 1, max: 1, value: 1, oninput: () => { view.budget[lane.name] = Number(part.range.value); stage.invalidate(); } }),
      answer: el("p", { class: "cfx-budget-answer", "aria-live": "polite" }),
      question: el("summary"),
      budget: el("details", { class: "cfx-budget" }),
      title: el("h2"),
      help: el("span"),
    };
    part.budget.append(part.question, part.range, part.answer);
    part.budget.addEventListener("toggle", () => { if (!part.budget.open) delete view.budget[lane.name]; stage.invalidate(); });
    part.canvas.addEventListener("click", click);
    part.canvas.addEventListener("pointerover", hover);
    part.canvas.addEventListener("pointerleave", stage.unpoint);
    part.canvas.addEventListener("keydown", key);
    part.canvas.addEventListener("focus", focus);
    const box = el("section", { class: `cfx-panel cfx-m-${stage.look(lane)}`, "data-lane": lane.name },
      el("header", { class: "cfx-panel-head" }, sign(stage.look(lane)), part.title, part.help, part.gain, part.solo, part.expand),
      text.box, part.story, part.canvas, part.why, part.budget);

    // ---- Painting ------------------------------------------------------------------------------

    const changed = memory();
    let drawn = new Set(); // nodes in the picture

    /** Everything that this panel's picture depends on. A selection is marked in the picture as it
     * stands, unless the node is folded away. */
    function look(index, narrow) {
      const open = view.open[`${lane.name}/${index}`];
      const { on, guess } = view.predict;
      const record = lane.rounds[index];
      const chosen = record && selectedHere(record);
      return [
        index, record && state.phaseOf(record), narrow, view.table, view.solo, view.expanded.has(lane.name),
        typeof chosen === "number" && !drawn.has(chosen) ? chosen : null, open && [...open], view.budget[lane.name],
        part.budget.open, on, guess[lane.name], stage.speech.language, lane.error, state.successor(lane, index) !== null,
      ];
    }

    /** Bring the panel up to date; true if its picture was painted anew. */
    function draw(narrow) {
      const index = state.current(lane);
      const record = lane.rounds[index];
      const anew = changed("picture", ...look(index, narrow));
      if (anew) paint(index, record, narrow);
      if (record && (anew || changed("marks", view.selected))) {
        text.draw(index, state.phaseOf(record));
        const chosen = selectedHere(record);
        tree.mark(part.canvas, id, chosen, state.twinNode(lane));
      }
      return anew;
    }

    function paint(index, record, narrow) {
      drawn = new Set();
      const expanded = view.expanded.has(lane.name);
      box.setAttribute("aria-label", stage.name(lane));
      part.title.textContent = stage.name(lane);
      if (changed("help", stage.speech.language)) part.help.replaceChildren(stage.ask("tree"));
      part.solo.textContent = say(view.solo === lane.name ? "panel.both" : "panel.solo");
      part.solo.hidden = narrow || state.panelLanes().length < 2;
      part.expand.textContent = say(expanded ? "panel.shrink" : "panel.expand");
      box.classList.toggle("cfx-expanded", expanded);
      if (!record) {
        part.gain.textContent = "";
        part.story.textContent = lane.error || say("panel.waiting");
        part.canvas.replaceChildren();
        part.why.replaceChildren();
        text.clear();
        part.budget.hidden = true;
        return;
      }
      const phase = state.phaseOf(record);
      const decided = phase >= 3;
      part.gain.textContent = phase < 4 ? "" : say("panel.gain", { n: record.tokens.length });
      const told = decided
        ? story.round(stage.speech, lane, record, state.run.header.prompt_tokens)
        : story.pending(stage.speech, lane, record, PHASES[phase - 1]);
      part.story.replaceChildren(sentence("span", {}, told));
      part.why.replaceChildren(sentence("span", {}, decided && record.index > 0 ? story.ending(stage.speech, record) : []));
      drawTree(record, phase, narrow, expanded);
      drawBudget(record, phase);
    }

    function drawTree(record, phase, narrow, expanded) {
      const size = record.tree.token_ids.length;
      const { canvas } = part;
      canvas.setAttribute("aria-label", say("tree.label", { method: stage.name(lane), n: Math.max(0, size - 1) }));
      if (!size || view.table) {
        canvas.setAttribute("role", "group");
        canvas.replaceChildren(size ? tree.table(record, phase, say, state.successor(lane, record.index)) : prefill(record));
        return;
      }
      const chosen = selectedHere(record);
      const keep = typeof chosen === "number" ? layout.lineage(record.tree, chosen) : [];
      const guess = view.predict.on ? view.predict.guess[lane.name] : undefined;
      const guessed = guess === undefined ? null : layout.lineage(record.tree, guess);
      if (guessed) keep.push(...guessed);
      const drawing = tree.plan(record, {
        rows: expanded ? 1000 : narrow ? OUTLINE_ROWS : ROWS,
        open: view.open[`${lane.name}/${record.index}`] || new Set(),
        keep, outline: narrow,
      });
      const budget = view.budget[lane.name];
      canvas.setAttribute("role", "tree");
      tree.paint(canvas, {
        record, phase, plan: drawing, say, id, successor: state.successor(lane, record.index),
        kept: budget ? layout.withBudget(record.tree, record.path, budget).kept : null,
        guess: guessed && new Set(guessed),
      });
      drawn = new Set(drawing.boxes.filter((box) => box.kind === "node").map((box) => box.node));
      // How much is folded away stands on the button that shows it.
      if (drawn.size < size) part.expand.textContent = say("panel.expand_more", { n: size - drawn.size });
      const place = `${record.index}/${narrow}/${expanded}`;
      if (canvas.dataset.place !== place) stage.later(() => showEnd(drawing));
      canvas.dataset.place = place;
    }

    /** Scroll a tree that is wider than its panel so that the end of the accepted path is seen. */
    function showEnd(drawing) {
      const end = drawing.boxes.find((one) => one.kind === "bonus");
      const right = end ? end.x + end.width + 12 : 0;
      part.canvas.scrollLeft = Math.max(0, right - part.canvas.clientWidth);
      part.canvas.scrollTop = end ? Math.max(0, end.y + 60 - part.canvas.clientHeight) : 0;
    }

    /** A round without a tree: what the pass read and what it wrote. */
    function prefill(record) {
      const own = story.bonusOf(record);
      const first = record.index === 0;
      const read = say(first ? "tree.prompt" : "tree.text", { n: first ? state.run.header.prompt_tokens : record.position });
      return el("div", { class: "cfx-prefill" },
        el("span", { class: "cfx-prefill-box", text: read }),
        el("span", { class: "cfx-prefill-arrow", text: "→" }),
        own && el("span", { class: "cfx-prefill-token" }, "◆ ", token(own.text, 20)));
    }

    function drawBudget(record, phase) {
      const size = record.tree.token_ids.length;
      part.budget.hidden = size < 3 || phase < 4 || view.predict.on;
      part.question.textContent = say("budget.title");
      if (part.budget.hidden || !part.budget.open) return;
      const budget = view.budget[lane.name] || size;
      part.range.max = size;
      part.range.value = budget;
      part.range.setAttribute("aria-label", say("budget.label"));
      const { accepted } = layout.withBudget(record.tree, record.path, budget);
      const gained = Math.min(accepted + 1, Math.max(1, record.tokens.length));
      part.answer.textContent = say("budget.answer", { drafted: budget - 1, full: size - 1, accepted, n: gained, was: record.tokens.length });
    }

    // ---- Pointer and keys ----------------------------------------------------------------------

    function selectedHere(record) {
      const chosen = view.selected;
      return chosen && chosen.lane === lane.name && chosen.round === record.index ? chosen.node : null;
    }

    function nodeAt(event) {
      const group = event.target.closest && event.target.closest("[data-node]");
      if (!group) return null;
      const name = group.dataset.node;
      return { name: name === "bonus" || name === "fold" ? name : Number(name), at: Number(group.dataset.at) };
    }

    function click(event) {
      const hit = nodeAt(event);
      const record = state.recordOf(lane);
      if (!hit || !record) return;
      if (hit.name === "fold") {
        const key = `${lane.name}/${record.index}`;
        view.open[key] = new Set([...(view.open[key] || []), hit.at]);
        stage.invalidate();
      } else choose(record, hit.name, true);
    }

    /** A chosen node: the learner's guess while they predict, else the subject of the card. */
    function choose(record, node, pin) {
      const guessing = view.predict.on && state.phaseOf(record) < 3 && node !== "bonus";
      if (guessing) state.guess(lane, node, story.lastOf(record));
      stage.select({ lane: lane.name, round: record.index, node }, pin || guessing);
    }

    function hover(event) {
      const hit = nodeAt(event);
      if (!hit || !stage.hasMoved(event) || hit.name === "fold") return;
      stage.point({ lane: lane.name, round: state.current(lane), node: hit.name });
    }

    function focus() {
      const record = state.recordOf(lane);
      if (!record || !record.tree.token_ids.length || view.table) return;
      if (selectedHere(record) === null) stage.select({ lane: lane.name, round: record.index, node: 0 }, false);
    }

    /** Arrow keys: to the parent, the first child, the siblings. */
    function key(event) {
      if (event.key === "Escape") {
        stage.leaveTree();
        event.preventDefault();
        return;
      }
      const record = state.recordOf(lane);
      const at = record && !view.table ? selectedHere(record) : null;
      if (at === null) return;
      const children = layout.childrenOf(record.tree);
      const last = story.lastOf(record);
      const own = story.bonusOf(record) && state.phaseOf(record) >= 3;
      const family = (node) => (node === last && own ? ["bonus", ...children[node]] : children[node]);
      const parent = at === "bonus" ? last : record.tree.parents[at];
      const siblings = parent < 0 ? [at] : family(parent);
      const moves = {
        ArrowLeft: () => (parent >= 0 ? parent : undefined),
        ArrowRight: () => (at === "bonus" ? undefined : family(at)[0]),
        ArrowUp: () => siblings[siblings.indexOf(at) - 1],
        ArrowDown: () => siblings[siblings.indexOf(at) + 1],
      };
      if (moves[event.key]) {
        const next = moves[event.key]();
        if (next !== undefined) stage.select({ lane: lane.name, round: record.index, node: next }, view.pinned);
        event.stopPropagation(); // not a step of the slider
      } else if (event.key === "Enter") choose(record, at, !view.pinned);
      else return;
      event.preventDefault();
    }

    return { box, canvas: part.canvas, draw };
  }

  return { create };
})(confuDom, confuLayout, confuStory, confuTree, confuChips);
