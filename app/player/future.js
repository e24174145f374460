// What steers ConFu's draft: both routers (never averaged), and our reading of the future token.

const confuFuture = (({ el, token, sign, sentence, memory }, layout, story, maps) => {
  const STILL = 0.005; // a change of weight too small to show

  function create(stage, box, backdrops) {
    const { state } = stage;
    const map = maps.create(stage, backdrops);

    /** The contemplating lane on show; with an intervention, the changed one is asked first. */
    function contemplating() {
      const able = (lane) => lane.rounds.some((r) => r.contemplate_router.length || r.future_router.length || r.future);
      const lanes = state.run.lanes.filter(able);
      return lanes.find((lane) => lane.name === state.view.tab) || lanes[0];
    }

    const changed = memory();

    /** Bring the part up to date; true if it was painted anew. */
    function draw() {
      const lane = contemplating();
      box.hidden = !lane;
      if (!lane) return false;
      // A reading may still come true while later rounds arrive.
      const known = Math.min(lane.rounds.length, state.current(lane) + layout.REACH);
      if (!changed("future", state.run.id, lane.name, state.current(lane), known, stage.speech.language)) {
        if (changed("pointed", state.pointedRound(lane))) map.draw(lane);
        return false;
      }
      const record = state.recordOf(lane);
      const before = lane.rounds[state.current(lane) - 1];
      const origin = record ? story.steering(stage.speech, lane, record) : [];
      for (const look of ["confu", "confu-lite", "changed"]) box.classList.toggle(`cfx-m-${look}`, stage.look(lane) === look);
      box.replaceChildren(
        el("header", { class: "cfx-panel-head" }, sign(stage.look(lane)), el("h2", { text: stage.say("future.title", { method: stage.name(lane) }) }),
          sentence("span", { class: "cfx-origin" }, origin)),
        el("div", { class: "cfx-future-row" },
          router("contemplate", record && record.contemplate_router, before && before.contemplate_router),
          router("future", record && record.future_router, before && before.future_router),
          el("div", {}, named(lane, record), readings(lane, record)),
          map.draw(lane)));
      return true;
    }

    function router(name, weights, before) {
      const node = el("div", { class: "cfx-router", "data-router": name },
        el("h3", {}, stage.say(`router.${name}`), stage.ask(name === "contemplate" ? "contemplate" : "expert")));
      if (!weights || !weights.length) {
        node.append(el("p", { class: "cfx-quiet", text: stage.say(`router.none_${name}`) }));
        return node;
      }
      const rows = weights.map((weight, expert) => {
        const change = before && before.length === weights.length ? weight - before[expert] : 0;
        const mark = Math.abs(change) < STILL ? "" : change > 0 ? "▲" : "▼";
        const signed = (change > 0 ? "+" : "") + change.toFixed(2);
        return el("li", { class: weight > 0 ? "cfx-on" : null },
          el("span", { class: "cfx-expert", text: `E${expert + 1}` }),
          el("span", { class: "cfx-meter" }, el("span", { style: `width:${(100 * weight).toFixed(1)}%` })),
          el("span", { class: "cfx-weight", text: weight > 0 ? layout.weight(weight) : "–" }),
          el("span", { class: "cfx-change", text: mark, title: mark ? stage.say("router.change", { change: signed }) : null }));
      });
      node.append(el("ol", { class: "cfx-experts" }, ...rows));
      return node;
    }

    /** What the future token names itself: a token for each depth of the draft. ConFu lite's names none. */
    function named(lane, record) {
      const words = (record && record.future && record.future.named) || [];
      if (!words.length) return null;
      const following = layout.tokensAfter(lane.rounds, record.index);
      return el("div", { class: "cfx-named" },
        el("h3", {}, stage.say("named.title"), stage.ask("future")), el("p", { class: "cfx-quiet", text: stage.say("named.note") }),
        el("ol", {}, ...words.map((word, depth) => {
          const came = following[depth] && following[depth].id === word.id;
          return el("li", { class: came ? "cfx-true" : null }, token(word.text, 20),
            el("span", { class: "cfx-weight", text: layout.percent(word.prob) }),
            el("span", { class: came ? "cfx-came" : "cfx-quiet", text: (came ? "✓ " : "") + stage.say(came ? "named.came" : "named.depth", { n: depth + 1 }) }));
        })));
    }

    function readings(lane, record) {
      const node = el("div", { class: "cfx-readings" },
        el("h3", {}, stage.say("readings.title"), stage.ask("future")), el("p", { class: "cfx-quiet", text: stage.say("readings.note") }));
      const future = record && record.future;
      if (!future || !future.readings.length) {
        node.append(el("p", { class: "cfx-quiet", text: stage.say("readings.none") }));
        return node;
      }
      const following = layout.tokensAfter(lane.rounds, record.index);
      node.append(el("ul", {}, ...future.readings.map((reading) => {
        const when = layout.cameTrue(reading.text, following);
        return el("li", { class: when ? "cfx-true" : null }, token(reading.text, 20),
          el("span", { class: "cfx-weight", text: layout.percent(reading.prob) }),
          el("span", { class: "cfx-came", text: when ? `✓ ${stage.say("readings.came", { n: when })}` : "" }));
      })));
      return node;
    }

    return { draw };
  }

  return { create };
})(confuDom, confuLayout, confuStory, confuMap);
