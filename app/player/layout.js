// Arithmetic of the player, without a page: what a token looks like, where nodes stand, which round
// a position shows. Every function is pure; tests run them in Node.

const confuLayout = (() => {
  const CONTROL = /[\u0000-\u001f\u007f-\u009f]/;
  const HIDDEN = /[\u00ad\u061c\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb]/;
  const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]/;
  const MARKS = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };

  const CHAR = 7.4; // advance of one 12 px monospace character
  const LINE = 15; // height of a line of text in a node
  const GAP = 20; // between a node and its children
  const PAD = 6; // between a node's frame and its text
  const INDENT = 20; // one level of the outline
  const BADGE = 30; // the count of folded nodes, in an outline inside their ancestor

  function codeName(character) {
    return "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  }

  /** Split a token into runs of plain text and of marks for what cannot be seen. */
  function visibleParts(text) {
    const parts = [];
    const push = (kind, piece) => {
      const last = parts[parts.length - 1];
      if (last && last.kind === kind) last.text += piece;
      else parts.push({ kind, text: piece });
    };
    for (const character of text) {
      const code = character.codePointAt(0);
      if (MARKS[character]) push("mark", MARKS[character]);
      else if (CONTROL.test(character)) {
        push("mark", code < 32 ? String.fromCodePoint(0x2400 + code) : codeName(character));
      } else if (HIDDEN.test(character)) push("mark", codeName(character));
      else if (code >= 0xd800 && code <= 0xdfff) push("mark", codeName(character));
      else push("text", character);
    }
    return parts;
  }

  /** The same as one string, cut to `limit` characters. */
  function visible(text, limit = Infinity) {
    const characters = Array.from(visibleParts(text).map((part) => part.text).join(""));
    if (characters.length <= limit) return characters.join("");
    return characters.slice(0, limit - 1).join("") + "…";
  }

  /** Parts cut to `limit` characters, for drawing marks apart from text. */
  function clippedParts(text, limit) {
    const out = [];
    let left = limit;
    for (const part of visibleParts(text)) {
      const characters = Array.from(part.text);
      if (characters.length > left) {
        out.push({ kind: part.kind, text: characters.slice(0, Math.max(0, left - 1)).join("") });
        out.push({ kind: "mark", text: "…" });
        return out;
      }
      out.push(part);
      left -= characters.length;
    }
    return out;
  }

  function textWidth(text) {
    let width = 0;
    for (const character of text) width += WIDE.test(character) || character.length > 1 ? 13 : CHAR;
    return width;
  }

  function percent(share) {
    const value = share * 100;
    if (value >= 99.5 && value < 100) return ">99%";
    if (value > 0 && value < 0.5) return "<1%";
    return Math.round(value) + "%";
  }

  /** An expert's weight; one that was chosen is never shown as nothing. */
  function weight(share) {
    return share < 0.005 ? "<0.01" : share.toFixed(2);
  }

  function childrenOf(tree) {
    const children = tree.parents.map(() => []);
    tree.parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
    for (const list of children) list.sort((a, b) => tree.scores[b] - tree.scores[a] || a - b);
    return children;
  }

  function rankOf(tree, node) {
    const siblings = childrenOf(tree)[tree.parents[node]] || [node];
    return { rank: siblings.indexOf(node) + 1, of: siblings.length };
  }

  /** Ancestors of a node, itself included, the root first. */
  function lineage(tree, node) {
    const line = [];
    for (let at = node; at >= 0; at = tree.parents[at]) line.unshift(at);
    return line;
  }

  /**
   * Hide low-scored leaves until the tree fits into `rows` rows. Nodes in `keep` stay, children of
   * nodes in `open` stay. Returns which nodes are shown, and for each node how many below it are not.
   */
  function fold(tree, keep, open, rows, outline) {
    const children = childrenOf(tree);
    const count = tree.parents.length;
    const shown = new Array(count).fill(true);
    const hidden = new Array(count).fill(0);
    const shownChildren = children.map((list) => list.length);
    const fixed = (node) => keep.has(node) || open.has(tree.parents[node]);
    const rowsNow = () => {
      let total = 1;
      for (let node = 0; node < count; node++) {
        if (!shown[node]) continue;
        if (outline || shownChildren[node] === 0) total += 1;
      }
      return total;
    };
    const order = tree.parents
      .map((_, node) => node)
      .filter((node) => node > 0 && !fixed(node))
      .sort((a, b) => tree.scores[a] - tree.scores[b] || tree.depths[b] - tree.depths[a] || b - a);
    let progress = true;
    while (progress && rowsNow() > rows) {
      progress = false;
      for (const node of order) {
        if (!shown[node] || shownChildren[node] > 0) continue;
        const parent = tree.parents[node];
        shown[node] = false;
        hidden[parent] += 1 + hidden[node];
        hidden[node] = 0;
        shownChildren[parent] -= 1;
        progress = true;
        break;
      }
    }
    return { shown, hidden };
  }

  /**
   * Place the nodes of a tree.
   *
   * options: path (accepted nodes), bonus ({text, prob} or null), rows, open (Set of nodes),
   * keep (Set), outline (one node per row and one line per node, for narrow pages),
   * lines(node) -> [token, figures] as strings, bonus.lines likewise.
   * Gives boxes {node, kind: "node" | "bonus" | "fold", x, y, width, height, count?}, edges
   * {from, to: box indices}, and the size. The states of the nodes do not enter, so that nothing
   * moves between the phases of a round.
   */
  function place(tree, options) {
    const children = childrenOf(tree);
    const path = options.path || [];
    const last = path.length ? path[path.length - 1] : 0;
    const keep = new Set([0, ...path, ...(options.keep || [])]);
    for (const node of children[last].slice(0, 2)) keep.add(node);
    const open = options.open || new Set();
    const rows = options.rows || 60;
    const { shown, hidden } = fold(tree, keep, open, rows, options.outline);
    const boxes = [];
    const edges = [];
    const columns = [];
    let row = 0;

    const measure = ([first, second], badge) => {
      if (options.outline) return textWidth(`${first} ${second}`) + badge;
      return Math.max(textWidth(first), textWidth(second));
    };
    const height = options.outline ? LINE + 6 : 2 * LINE + 4;

    const add = (kind, node, depth, lines, parentBox) => {
      const width = Math.ceil(measure(lines, node >= 0 && hidden[node] ? BADGE : 0)) + 2 * PAD;
      boxes.push({ kind, node, depth, row, width, height });
      columns[depth] = Math.max(columns[depth] || 0, width);
      if (parentBox >= 0) edges.push({ from: parentBox, to: boxes.length - 1 });
      return boxes.length - 1;
    };

    const walk = (node, depth, parentBox) => {
      const index = add("node", node, depth, options.lines(node), parentBox);
      if (options.outline) row += 1;
      let used = false;
      const next = (visit) => {
        if (!options.outline && used) row += 1;
        used = true;
        visit();
      };
      if (options.bonus && node === last) {
        next(() => {
          add("bonus", -1, depth + 1, options.bonus.lines, index);
          if (options.outline) row += 1;
        });
      }
      for (const child of children[node]) {
        if (shown[child]) next(() => walk(child, depth + 1, index));
      }
    };
    walk(0, 0, -1);

    const left = [];
    let x = 6;
    for (let depth = 0; depth < columns.length; depth++) {
      left[depth] = options.outline ? 6 + depth * INDENT : x;
      x += (columns[depth] || 0) + GAP;
    }
    const pitch = height + (options.outline ? 5 : 6);
    let width = 0;
    for (const box of boxes) {
      box.x = left[box.depth];
      box.y = 6 + box.row * pitch;
      width = Math.max(width, box.x + box.width + 12);
    }
    // What is folded below a node is counted in a badge: in a tree over its lower right corner, in an
    // outline at its end.
    for (const box of boxes.slice()) {
      if (box.kind !== "node" || !hidden[box.node]) continue;
      box.folds = true;
      const { node, depth } = box;
      const x = box.x + box.width - (options.outline ? BADGE - 2 : PAD);
      const y = box.y + height - (options.outline ? LINE + 3 : 11);
      const count = hidden[node];
      const span = options.outline ? BADGE - 6 : 12 + 7 * String(count).length;
      boxes.push({ kind: "fold", node, depth, row: box.row, x, y, width: span, height: LINE, count });
    }
    const lastRow = Math.max(...boxes.map((box) => box.row));
    return { boxes, edges, width, height: 8 + (lastRow + 1) * pitch, outline: Boolean(options.outline) };
  }

  function edgePath(from, to, outline) {
    const y2 = to.y + to.height / 2;
    if (outline) {
      const x = from.x + 9;
      return `M${x},${from.y + from.height} L${x},${y2} L${to.x},${y2}`;
    }
    const x1 = from.x + from.width;
    const y1 = from.y + from.height / 2;
    if (y1 === y2) return `M${x1},${y1} L${to.x},${y2}`;
    const bend = to.x - GAP / 2;
    return `M${x1},${y1} C${bend + 6},${y1} ${bend - 8},${y2} ${to.x},${y2}`;
  }

  /** Where each round's tokens start in the answer. */
  function starts(rounds) {
    const list = [];
    let at = 0;
    for (const record of rounds) {
      list.push(at);
      at += record.tokens.length;
    }
    return list;
  }

  function tokensOf(rounds) {
    return rounds.flatMap((record) => record.tokens);
  }

  function secondsOf(record) {
    return record.seconds.draft + record.seconds.verify + record.seconds.rest;
  }

  /** Compute time of a lane up to and with a round. */
  function elapsed(rounds, index) {
    return rounds.slice(0, index + 1).reduce((sum, record) => sum + secondsOf(record), 0);
  }

  /** The round that a lane shows at a position of the slider; -1 before its first round. */
  function roundAt(rounds, position, align) {
    const last = rounds.length - 1;
    if (align === "round") return Math.min(position, last);
    const begins = starts(rounds);
    let found = Math.min(0, last);
    for (let i = 0; i <= last; i++) if (begins[i] <= position) found = i;
    return found;
  }

  /** Bars of one lane's timeline as {x, width, height} in shares of the drawing. */
  function bars(rounds, align, scale) {
    const begins = starts(rounds);
    let time = 0;
    return rounds.map((record, i) => {
      const gained = record.tokens.length;
      const height = Math.min(1, gained / scale.tallest);
      if (align === "text") return { x: begins[i] / scale.tokens, width: gained / scale.tokens, height };
      if (align === "time") {
        const share = secondsOf(record) / scale.seconds;
        const bar = { x: time, width: share, height };
        time += share;
        return bar;
      }
      return { x: i / scale.rounds, width: 1 / scale.rounds, height };
    });
  }

  function timelineScale(lanes) {
    const all = lanes.map((lane) => lane.rounds);
    const most = (measure) => Math.max(1e-9, ...all.map(measure));
    return {
      rounds: Math.max(1, most((r) => r.length)),
      tokens: Math.max(1, most((r) => tokensOf(r).length)),
      seconds: most((r) => r.reduce((sum, record) => sum + secondsOf(record), 0)),
      tallest: Math.max(2, most((r) => Math.max(0, ...r.map((record) => record.tokens.length)))),
    };
  }

  /** Tokens and rows per target pass; bonus tokens included, prefill left out (method.md). */
  function speedOf(rounds) {
    const passes = Math.max(0, rounds.length - 1);
    const gained = tokensOf(rounds.slice(1)).length;
    return {
      passes,
      tokens: tokensOf(rounds).length,
      tau: passes ? gained / passes : 0,
      rows: passes ? rounds.slice(1).reduce((sum, record) => sum + record.target_rows, 0) / passes : 0,
      seconds: rounds.reduce((sum, record) => sum + secondsOf(record), 0),
    };
  }

  /**
   * The first token where lane b leaves lane a, as far as both have come. A lane that ended by
   * itself while the other went on differs there too. Mirrors `Trace.differences`.
   */
  function firstDifference(a, b) {
    const left = tokensOf(a.rounds);
    const right = tokensOf(b.rounds);
    const shared = Math.min(left.length, right.length);
    for (let index = 0; index < shared; index++) {
      if (left[index].id !== right[index].id) {
        return {
          index,
          textA: left[index].text,
          textB: right[index].text,
          margin: Math.min(left[index].margin, right[index].margin),
        };
      }
    }
    const ended = (lane) => {
      const stop = lane.rounds.length ? lane.rounds[lane.rounds.length - 1].stop : null;
      return !lane.error && stop && stop !== "cancelled";
    };
    if (left.length === right.length || !ended(a) || !ended(b)) return null;
    const longer = left.length > right.length ? left : right;
    return {
      index: shared,
      textA: left.length > right.length ? left[shared].text : "",
      textB: left.length > right.length ? "" : right[shared].text,
      margin: longer[shared].margin,
    };
  }

  const REACH = 8; // tokens within which a reading of a future token may come true

  /** The tokens written from a round on, as many as a reading is given to come true. */
  function tokensAfter(rounds, index) {
    const tokens = [];
    for (let at = index; at < rounds.length && tokens.length < REACH; at++) tokens.push(...rounds[at].tokens);
    return tokens.slice(0, REACH);
  }

  /** As the how-manieth of these tokens a word came, or 0. Mirrors `came_true` of `views/futures.py`. */
  function cameTrue(word, following) {
    const plain = (text) => text.trim().toLowerCase();
    const wanted = plain(word);
    if (!wanted) return 0;
    return following.findIndex((token) => plain(token.text) === wanted) + 1;
  }

  /**
   * What this round had accepted with only the `budget` best nodes (root included). Exact for this
   * round alone: re-ranking keeps the best by cumulative score, so a smaller tree is a prefix of
   * that order. Ties go to the shallower node, so no child outlives its parent.
   */
  function withBudget(tree, path, budget) {
    const order = tree.parents
      .map((_, node) => node)
      .sort((a, b) => tree.scores[b] - tree.scores[a] || tree.depths[a] - tree.depths[b] || a - b);
    const kept = new Set(order.slice(0, budget));
    let accepted = 0;
    while (accepted < path.length && kept.has(path[accepted])) accepted += 1;
    return { kept, accepted };
  }

  /**
   * From map coordinates to a square of `size`, one scale for both axes, y upwards. Points beyond
   * the given ones stay on the rim.
   */
  function mapScale(points, size, edge) {
    const [xs, ys] = [0, 1].map((axis) => points.map((point) => point[axis]));
    const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const scale = (size - 2 * edge) / (Math.max(right - left, high - low) || 1);
    const clamp = (value) => Math.min(size - edge / 2, Math.max(edge / 2, value));
    return ([x, y]) => [
      clamp(size / 2 + scale * (x - (left + right) / 2)),
      clamp(size / 2 - scale * (y - (low + high) / 2)),
    ];
  }

  return {
    BADGE, PAD, visible, visibleParts, clippedParts, textWidth, percent, weight, childrenOf, rankOf, lineage, fold,
    place, edgePath, starts, tokensOf, secondsOf, elapsed, roundAt, bars, timelineScale, speedOf,
    firstDifference, REACH, tokensAfter, cameTrue, withBudget, mapScale, codeName,
  };
})();

if (typeof module !== "undefined") module.exports = confuLayout;
