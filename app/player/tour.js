// The guided tour: cards that move the slider and outline the part that they talk about.

const confuTour = (({ el }) => {
  let box = null;
  let stage = null;
  let at = 0;

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
    const next = last
      ? el("button", { type: "button", class: "cfx-button cfx-primary", text: stage.say("tour.done"), onclick: stop })
      : move("tour.next", at + 1);
    next.classList.add("cfx-primary");
    box.setAttribute("aria-label", stage.say(`tour.${card.key}`));
    box.replaceChildren(
      el("div", { class: "cfx-guide-count", text: stage.say("tour.count", { at: at + 1, total: stage.cards.length }) }),
      el("h2", { text: stage.say(`tour.${card.key}`) }),
      el("p", { text: stage.say(`tour.${card.key}_text`) }),
      el("div", { class: "cfx-guide-buttons" },
        el("button", { type: "button", class: "cfx-button", text: stage.say("tour.skip"), onclick: stop, hidden: last }),
        at > 0 && move("tour.back", at - 1), next));
    next.focus({ preventScroll: true });
  }

  function stop() {
    if (!box) return;
    stage.spot(null);
    box.remove();
    box = null;
  }

  return { start };
})(confuDom);
