// The small map of future tokens: where this run's have been, on the head's fixed axes.

const confuMap = (({ el, svg, memory }, layout) => {
  const SIZE = 190;
  const EDGE = 10;

  /**
   * @param stage the player's stage.
   * @param backdrops per head (sha256) the reference points [x, y] that fix the scale.
   */
  function create(stage, backdrops) {
    const { state } = stage;
    const changed = memory();
    const none = el("p", { class: "cfx-quiet" });
    const known = svg("path", { class: "cfx-map-known" });
    const trail = svg("polyline", { class: "cfx-map-trail" });
    const canvas = svg("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, class: "cfx-map-canvas", role: "img" }, known, trail);
    const title = el("h3");
    const note = el("p", { class: "cfx-quiet" });
    const box = el("div", { class: "cfx-map" }, title, none, canvas, note);
    let marks = []; // {index, mark, at} of the rounds that have a point

    canvas.addEventListener("click", (event) => choose(event, (lane, index) => stage.jumpTo(lane, index)));
    canvas.addEventListener("pointerover", (event) => choose(event, (lane, index) => {
      if (stage.hasMoved(event)) stage.point({ lane: lane.name, round: index, node: null });
    }));
    canvas.addEventListener("pointerleave", stage.unpoint);

    function choose(event, act) {
      const { lane, round } = event.target.dataset;
      if (round !== undefined && state.laneOf(lane)) act(state.laneOf(lane), Number(round));
    }

    /** The map of a lane; its points are made once, a round adds one. */
    function draw(lane) {
      const backdrop = (lane.head && backdrops[lane.head.sha256]) || [];
      const placed = lane.rounds.flatMap((record, index) =>
        record.future && record.future.point ? [{ index, point: record.future.point }] : []);
      // Without reference points the run's own give the scale, later rounds included.
      const at = layout.mapScale(backdrop.length ? backdrop : placed.map((entry) => entry.point), SIZE, EDGE);
      if (changed("map", state.run.id, lane.name, backdrop.length || placed.length)) {
        for (const { mark } of marks) mark.remove();
        marks = [];
        known.setAttribute("d", backdrop.map((point) => `M${pair(at(point), " ")}h0`).join(""));
      }
      for (const { index, point } of placed.slice(marks.length)) {
        const [cx, cy] = at(point).map((value) => value.toFixed(1));
        const mark = svg("circle", { cx, cy, "data-round": index, "data-lane": lane.name },
          svg("title", { text: stage.say("map.round", { n: index }) }));
        canvas.append(mark);
        marks.push({ index, mark, at: pair(at(point), ",") });
      }
      place(lane);
      return box;
    }

    const pair = ([x, y], between) => `${x.toFixed(1)}${between}${y.toFixed(1)}`;

    /** Show the trail up to the round on show, and mark that round and the one pointed at. */
    function place(lane) {
      const now = state.current(lane);
      const pointed = state.pointedRound(lane);
      const past = marks.filter((entry) => entry.index <= now);
      for (const { index, mark } of marks) {
        const kind = index > now ? "later" : index === now ? "now" : "past";
        const looks = [`cfx-map-${kind}`, index === pointed && "cfx-pointed", came(lane, index) && "cfx-came"];
        mark.setAttribute("class", looks.filter(Boolean).join(" "));
        mark.setAttribute("r", index === now || index === pointed ? 5.5 : 3);
      }
      trail.setAttribute("points", past.map((entry) => entry.at).join(" "));
      if (changed("title", stage.speech.language)) title.replaceChildren(stage.say("tab.futures"), stage.ask("map"));
      none.textContent = stage.say("map.none");
      note.textContent = stage.say("map.note");
      none.hidden = past.length > 0;
      note.hidden = !past.length;
      canvas.toggleAttribute("hidden", !past.length);
      canvas.setAttribute("aria-label", stage.say("map.spoken", { n: past.length }));
    }

    /** Whether the likeliest word of a round came true; a later round may still bring it. */
    function came(lane, index) {
      const [likeliest] = lane.rounds[index].future.readings;
      return likeliest && layout.cameTrue(likeliest.text, layout.tokensAfter(lane.rounds, index)) > 0;
    }

    return { draw };
  }

  return { create };
})(confuDom, confuLayout);
