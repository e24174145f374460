// The text so far as token chips: each knows its round, its origin and its node.

const confuChips = (({ el, token }, layout) => {
  function create(stage, lane) {
    const { state } = stage;
    const box = el("div", { class: "cfx-chips", role: "group" });

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

    /** Chips up to a round; before its last phase without that round's own tokens. */
    function draw(index, phase) {
      const begins = layout.starts(lane.rounds);
      const marked = state.selectedIndex();
      const own = state.view.selected && state.view.selected.lane === lane.name;
      const chips = [];
      for (let r = 0; r <= (phase < 4 ? index - 1 : index); r++) {
        lane.rounds[r].tokens.forEach((item, step) => {
          const classes = ["cfx-chip", item.origin === "bonus" ? "cfx-chip-target" : "cfx-chip-accepted"];
          if (r === index) classes.push("cfx-new");
          // The same place in the text is marked in every lane.
          if (begins[r] + step === marked) classes.push(own ? "cfx-selected" : "cfx-twin");
          chips.push(el("button", {
            type: "button", class: classes.join(" "), tabindex: "-1", "data-round": r, "data-step": step,
            "aria-label": stage.say("chip.label", { token: layout.visible(item.text, 60), origin: stage.say(`origin.${item.origin}`), round: r }),
          }, token(item.text, 40)));
          if (/\n/.test(item.text)) chips.push(el("span", { class: "cfx-break", "aria-hidden": "true" }));
        });
      }
      box.setAttribute("aria-label", stage.say("chip.box", { method: stage.name(lane) }));
      box.replaceChildren(...chips);
      box.scrollTop = box.scrollHeight;
    }

    return { box, draw, clear: () => box.replaceChildren() };
  }

  return { create };
})(confuDom, confuLayout);
