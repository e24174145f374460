// The guided tour: cards that move the slider and outline the part that they talk about. Some end
// with something to do; their "next" is a mere "skip" until the learner has done it.

const confuTour = (({ el }) => {
  let box = null;
  let stage = null;
  let at = 0;
  let from = 0; // where the slider stood when the card came
  let next = null;

  /** What a card can ask the learner to do, each with how to tell that it is done. */
  const ACTS = {
    rejected: ({ view, laneOf }) => {
      const chosen = view.selected;
      const record = chosen && laneOf(chosen.lane) && laneOf(chosen.lane).rounds[chosen.round];
      return Boolean(record) && record.tree.states[chosen.node] === "rejected";
    },
    moved: (state) => state.place() !== from,
    predict: ({ view }) => view.predict.asked > 0,
  };

  function start(newStage) {
    stop();
    stage = newStage;
    box = el("aside", { class: "cfx-guide", role: "dialog", tabindex: "-1" });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") stop();
      event.stopPropagation();
    });
    stage.root.append(box);
    go(0);
  }

  function go(index) {
    at = index;
    const card = stage.cards[at];
    stage.show(card.round, card.phase);
    stage.spot(card.target);
    const target = stage.root.querySelector(card.target);
    if (target) target.scrollIntoView({ block: "center", behavior: "auto" });
    const move = (key, to) =>
      el("button", { type: "button", class: "cfx-button", text: stage.say(key), onclick: () => go(to) });
    const last = at === stage.cards.length - 1;
    next = move("tour.next", at + 1);
    if (last) next = el("button", { type: "button", class: "cfx-button", onclick: stop });
    from = stage.state.place();
    box.setAttribute("aria-label", stage.say(`tour.${card.key}`));
    const act = card.act &&
      el("p", { class: "cfx-guide-act" }, el("span", { class: "cfx-guide-tick" }), stage.say(`tour.${card.key}_act`));
    box.replaceChildren(el("div", {},
      el("div", { class: "cfx-guide-count", text: stage.say("tour.count", { at: at + 1, total: stage.cards.length }) }),
      el("h2", { text: stage.say(`tour.${card.key}`) }),
      el("p", { text: stage.say(`tour.${card.key}_text`) }),
      act,
      el("div", { class: "cfx-guide-buttons" },
        el("button", { type: "button", class: "cfx-button", text: stage.say("tour.skip"), onclick: stop, hidden: last }),
        at > 0 && move("tour.back", at - 1), next)));
    next.focus({ preventScroll: true });
    update();
  }

  /** Called after each painting: has the learner done what the card asks? */
  function update() {
    if (!box || !next) return;
    const card = stage.cards[at];
    const done = !card.act || ACTS[card.act](stage.state);
    const last = at === stage.cards.length - 1;
    next.textContent = stage.say(last ? "tour.done" : done ? "tour.next" : "tour.skip_act");
    next.classList.toggle("cfx-primary", done);
    box.classList.toggle("cfx-guide-done", Boolean(card.act) && done);
  }

  function stop() {
    if (!box) return;
    stage.spot(null);
    box.remove();
    box = null;
  }

  return { start, update };
})(confuDom);
