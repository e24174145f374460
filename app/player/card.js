// The details of the selected token, and the legend.

const confuCard = (({ el, svg, sign, token, sentence, memory }, layout, story, tree) => {
  function create(stage, box, legend) {
    const { state } = stage;
    const changed = memory();

    function draw() {
      const { selected: chosen, pinned } = state.view;
      const lane = chosen && state.laneOf(chosen.lane);
      const record = lane && lane.rounds[chosen.round];
      const about = record && [state.phaseOf(record), state.current(lane), state.successor(lane, chosen.round)];
      if (!changed("card", state.run.id, stage.speech.language, chosen, pinned, about)) return;
      box.setAttribute("aria-label", stage.say("card.label"));
      if (!record || (record.tree.token_ids.length < 2 && typeof chosen.node === "number")) {
        box.className = "cfx-card cfx-card-empty";
        box.replaceChildren(el("p", { text: stage.say("card.empty") }));
      } else if (chosen.node === null) whole(lane, record);
      else fill(lane, record, chosen.node);
      box.classList.toggle("cfx-hidden", state.view.hidden.has("card"));
    }

    /** A whole round: what it did, in a sentence. */
    function whole(lane, record) {
      // What the reader is still asked to guess is not told here.
      const decided = record.index !== state.current(lane) || state.phaseOf(record) >= 3;
      const told = decided ? story.round(stage.speech, lane, record, state.run.header.prompt_tokens)
        : stage.speech.parts("card.undecided", {});
      const place = `${stage.name(lane)} · ${stage.say("map.round", { n: record.index })}`;
      box.className = "cfx-card cfx-card-round";
      box.replaceChildren(sign(stage.look(lane)), el("span", { class: "cfx-state", text: place }), sentence("p", { class: "cfx-card-why" }, told));
    }

    function fill(lane, record, node) {
      const phase = state.phaseOf(record);
      const own = node === "bonus";
      const bonus = story.bonusOf(record);
      const kind = own ? "target" : tree.shownState(record, node, phase);
      const word = kind.replace(" ", "_");
      const facts = own ? bonusFacts(record, bonus) : nodeFacts(lane, record, node, phase);
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

    function nodeFacts(lane, record, node, phase) {
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
      if (phase >= 2 && record.contemplated.length) {
        const successor = state.successor(lane, record.index);
        const carried = tree.contemplation(record, node, phase, successor) || "none";
        facts.push(fact("card.contemplate", stage.say(`card.contemplate_${carried}`)));
      }
      return facts;
    }

    function drawLegend() {
      const dots = svg("svg", { viewBox: "0 0 30 14", class: "cfx-key-dots", "aria-hidden": "true" },
        svg("circle", { cx: 7, cy: 7, r: 3.4, class: "cfx-dot cfx-dot-carried" }), svg("circle", { cx: 21, cy: 7, r: 3.4, class: "cfx-dot cfx-dot-source" }));
      const entry = (kind) => el("li", { class: `cfx-key cfx-is-${kind}` }, el("span", { class: "cfx-swatch" }), stage.say(`legend.${kind.replace("-", "_")}`));
      legend.replaceChildren(
        el("ul", {}, ...["root", "accepted", "target", "rejected", "not-reached", "pending"].map(entry),
          el("li", { class: "cfx-key" }, dots, stage.say("legend.contemplate"))),
        el("p", { text: stage.say("legend.numbers") }));
    }

    return { draw, drawLegend };
  }

  return { create };
})(confuDom, confuLayout, confuStory, confuTree);
