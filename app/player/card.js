// The details of the selected token, and the legend.

const confuCard = (({ el, token, sentence }, layout, story, tree) => {
  function create(stage, box, legend) {
    const { state } = stage;

    function draw() {
      const chosen = state.view.selected;
      const lane = chosen && state.laneOf(chosen.lane);
      const record = lane && lane.rounds[chosen.round];
      box.setAttribute("aria-label", stage.say("card.label"));
      if (!record || (record.tree.token_ids.length < 2 && chosen.node !== "bonus")) {
        box.className = "cfx-card cfx-card-empty";
        box.replaceChildren(el("p", { text: stage.say("card.empty") }));
      } else fill(record, chosen.node);
      box.classList.toggle("cfx-hidden", state.view.hidden.has("card"));
    }

    function fill(record, node) {
      const phase = state.phaseOf(record);
      const own = node === "bonus";
      const bonus = story.bonusOf(record);
      const kind = own ? "target" : tree.shownState(record, node, phase);
      const word = kind.replace(" ", "_");
      const facts = own ? bonusFacts(record, bonus) : nodeFacts(record, node, phase);
      const why = own ? story.bonus(stage.speech, record)
        : phase < 3 ? stage.speech.parts("card.undecided", {}) : story.node(stage.speech, record, node);
      box.className = `cfx-card cfx-is-${kind.replace(" ", "-")}`;
      box.replaceChildren(
        el("div", { class: "cfx-card-token" }, el("span", { class: "cfx-state", text: stage.say(`state.${word}`) }), token(own ? bonus.text : record.tree.texts[node], 220)),
        el("dl", {}, ...facts), sentence("p", { class: "cfx-card-why" }, why),
        el("span", { class: "cfx-pin", text: stage.say(state.view.pinned ? "card.pinned" : "card.pin") }));
    }

    function fact(key, ...value) {
      return el("div", { class: "cfx-fact" }, el("dt", { text: stage.say(key) }), el("dd", {}, ...value.map((piece) => (piece instanceof Node ? piece : String(piece)))));
    }

    function bonusFacts(record, bonus) {
      return [
        fact("card.id", bonus.id), fact("card.target", tree.bonusShare(record) || "–"),
        fact("card.margin", bonus.margin.toFixed(2)),
      ];
    }

    function nodeFacts(record, node, phase) {
      const own = record.tree;
      const facts = [fact("card.id", own.token_ids[node])];
      if (node > 0) {
        facts.push(fact("card.rank", stage.say("card.rank_of", layout.rankOf(own, node))),
          fact("card.draft", layout.percent(own.draft_probs[node])), fact("card.score", own.scores[node].toFixed(2)));
        if (phase >= 2) facts.push(fact("card.target", layout.percent(own.target_probs[node])));
      }
      if (phase >= 3) {
        const at = node === 0 ? 0 : own.parents[node];
        facts.push(fact(node === 0 ? "card.wanted_next" : "card.wanted", token(own.choice_texts[at], 20), ` ${layout.percent(own.choice_probs[at])}`));
      }
      return facts;
    }

    function drawLegend() {
      const entry = (kind) => el("li", { class: `cfx-key cfx-is-${kind}` }, el("span", { class: "cfx-swatch" }), stage.say(`legend.${kind.replace("-", "_")}`));
      legend.replaceChildren(
        el("ul", {}, ...["root", "accepted", "target", "rejected", "not-reached", "pending"].map(entry)),
        el("p", { text: stage.say("legend.numbers") }));
    }

    return { draw, drawLegend };
  }

  return { create };
})(confuDom, confuLayout, confuStory, confuTree);
