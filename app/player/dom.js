// Building elements. Text always enters through textContent: nothing a model wrote is ever markup.

const confuDom = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "text") node.textContent = value;
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children) {
      if (child !== null && child !== undefined && child !== false) node.append(child);
    }
    return node;
  }

  function el(tag, attributes, ...children) {
    return fill(document.createElement(tag), attributes, children);
  }

  function svg(tag, attributes, ...children) {
    return fill(document.createElementNS(SVG, tag), attributes, children);
  }

  const ICONS = {
    first: "M3 3v10M13 3 6 8l7 5z",
    back: "M11 3 4 8l7 5z",
    play: "M4 2.5v11l9-5.5z",
    pause: "M4 3h3v10H4zM9.5 3h3v10h-3z",
    forward: "M5 3l7 5-7 5z",
    last: "M13 3v10M3 3l7 5-7 5z",
  };

  function icon(name) {
    const path = svg("path", { d: ICONS[name] });
    return svg("svg", { viewBox: "0 0 16 16", class: "cfx-icon", "aria-hidden": "true" }, path);
  }

  /** A token in inline HTML: marks for whitespace and control characters stand apart by class. */
  function token(text, limit) {
    const span = el("span", { class: "cfx-token" });
    for (const part of confuLayout.clippedParts(text, limit || Infinity)) {
      span.append(part.kind === "mark" ? el("i", { text: part.text }) : part.text);
    }
    return span;
  }

  /** The sign of a method: a shape in its colour with its letter. */
  function sign(method) {
    const letter = { plain: "P", eagle3: "A", confu: "B", changed: "C", "confu-lite": "D" }[method] || "?";
    const shapes = {
      plain: "M10 2 18.5 17.5H1.5z",
      eagle3: "M10 1.5a8.5 8.5 0 1 0 0.01 0z",
      confu: "M2 2h16v16H2z",
      changed: "M10 0 20 10 10 20 0 10z",
      "confu-lite": "M5 1.5h10L20 10l-5 8.5H5L0 10z",
    };
    const shape = svg("path", { d: shapes[method] || shapes.eagle3 });
    return svg(
      "svg",
      { viewBox: "0 0 20 20", class: `cfx-sign cfx-sign-${method}`, "aria-hidden": "true" },
      shape,
      svg("text", { x: 10, y: method === "plain" ? 15.5 : 14, "text-anchor": "middle", text: letter }),
    );
  }

  /**
   * A sentence with tokens in it: `parts` of story.js, plain strings and {token} objects. A token
   * cannot close its own box, whatever it contains.
   */
  function sentence(tag, attributes, parts) {
    const node = el(tag, attributes);
    for (const part of parts) {
      node.append(typeof part === "string" ? part : token(part.token, 24));
    }
    return node;
  }

  /** A "?" that unfolds a word's meaning; works by mouse, touch and keys alike. */
  function ask(word, meaning) {
    return el("details", { class: "cfx-ask" },
      el("summary", { "aria-label": `? ${word}`, text: "?" }), el("p", {}, el("b", { text: word }), ` ${meaning}`));
  }

  /**
   * A memory of what was painted last: `changed(part, key)` is true if the part has another key than
   * the last time, so that a part is painted anew only then.
   */
  function memory() {
    const keys = new Map();
    return (part, ...key) => {
      const now = JSON.stringify(key);
      if (keys.get(part) === now) return false;
      keys.set(part, now);
      return true;
    };
  }

  return { el, svg, icon, token, sign, sentence, ask, memory };
})();
