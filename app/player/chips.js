// The text so far as token chips: each knows its round, its origin and its node.

const confuChips = (({ el, token }, layout) => {
  function create(stage, lane) {
    const { state } = stage;
    const text = el("div", { class: "cfx-text" });
    const box = el("div", { class: "cfx-chips", role: "group", tabindex: "0" }, text);

    function nodeOf(chip) {
      const record = lane.rounds[Number(chip.dataset.round)];
      const step = Number(chip.dataset.step);
      return step < record.path.length ? record.path[step] : "bonus";
    }

    const chipAt = (event) => event.target.closest && event.target.closest(".cfx-chip");

    function hover(event) {
      const chip = chipAt(event);
      if (!chip || !stage.hasMoved(event)) return;
      stage.point({ lane: lane.name, round: Number(chip.dataset.round), node: nodeOf(chip) });
    }

    box.addEventListener("click", (event) => {
      const chip = chipAt(event);
      if (chip) stage.jumpTo(lane, Number(chip.dataset.round), nodeOf(chip));
    });
    box.addEventListener("pointerover", hover);
    box.addEventListener("pointerleave", stage.unpoint);

    // Chips are made once and kept: a step adds a few, a move shows more or fewer of them.
    let made = []; // {chip, after} by answer position
    let language = null;
    let shown = 0;
    let marked = [];

    function make(record, step) {
      const item = record.tokens[step];
      const origin = item.origin === "bonus" ? "cfx-chip-target" : "cfx-chip-accepted";
      const label = stage.say("chip.label", { token: layout.visible(item.text, 60), origin: stage.say(`origin.${item.origin}`), round: record.index });
      const chip = el("button", {
        type: "button", class: `cfx-chip ${origin}`, tabindex: "-1", "data-round": record.index, "data-step": step, "aria-label": label,
      }, token(item.text, 40));
      return { chip, after: /\n/.test(item.text) ? el("span", { class: "cfx-break", "aria-hidden": "true" }) : null };
    }

    function prepare() {
      if (language !== stage.speech.language) clear();
      language = stage.speech.language;
      const begins = layout.starts(lane.rounds);
      lane.rounds.forEach((record, index) => record.tokens.forEach((_, step) => {
        if (begins[index] + step === made.length) made.push(make(record, step));
      }));
      return begins;
    }

    function showUpTo(end) {
      for (; shown < end; shown++) {
        const { chip, after } = made[shown];
        text.append(chip);
        if (after) text.append(after);
      }
      for (; shown > end; shown--) {
        const { chip, after } = made[shown - 1];
        chip.remove();
        if (after) after.remove();
      }
    }

    /** Chips up to a round; before its last phase without that round's own tokens. */
    function draw(index, phase) {
      const begins = prepare();
      const start = begins[index];
      const end = phase < 4 ? start : start + lane.rounds[index].tokens.length;
      showUpTo(end);
      for (const chip of marked) chip.classList.remove("cfx-new", "cfx-selected", "cfx-twin");
      marked = made.slice(start, end).map(({ chip }) => chip);
      for (const chip of marked) chip.classList.add("cfx-new");
      const span = state.selectedSpan();
      const own = span && state.view.selected.lane === lane.name;
      // The same place in the text is marked in every lane.
      for (let at = span ? span[0] : end; at < end && at < span[1]; at++) {
        made[at].chip.classList.add(own ? "cfx-selected" : "cfx-twin");
        marked.push(made[at].chip);
      }
      box.setAttribute("aria-label", stage.say("chip.box", { method: stage.name(lane) }));
    }

    function clear() {
      text.replaceChildren();
      made = [];
      shown = 0;
      marked = [];
    }

    return { box, draw, clear };
  }

  return { create };
})(confuDom, confuLayout);
