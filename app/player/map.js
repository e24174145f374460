// The small map of future tokens: where this run's have been, on the head's fixed axes.

const confuMap = (({ el, svg }, layout) => {
  const SIZE = 190;
  const EDGE = 10;

  /**
   * @param stage the player's stage.
   * @param backdrops per head (sha256) the reference points [x, y] that fix the scale.
   */
  function create(stage, backdrops) {
    function draw(lane) {
      const { state } = stage;
      const node = el("div", { class: "cfx-map" }, el("h3", { text: stage.say("tab.futures") }));
      const now = state.current(lane);
      const trail = lane.rounds
        .map((record, index) => ({ index, point: record.future && record.future.point }))
        .filter((entry) => entry.point && entry.index <= now);
      if (!trail.length) {
        node.append(el("p", { class: "cfx-quiet", text: stage.say("map.none") }));
        return node;
      }
      const backdrop = (lane.head && backdrops[lane.head.sha256]) || [];
      // Without reference points the run's own give the scale, later rounds included.
      const own = lane.rounds.filter((r) => r.future && r.future.point).map((r) => r.future.point);
      const at = layout.mapScale(backdrop.length ? backdrop : own, SIZE, EDGE);
      const canvas = svg("svg", {
        viewBox: `0 0 ${SIZE} ${SIZE}`, class: "cfx-map-canvas", role: "img",
        "aria-label": stage.say("map.spoken", { n: trail.length }),
      });
      for (const point of backdrop) dot(canvas, at(point), 1.6, "cfx-map-known");
      const corners = trail.map((entry) => at(entry.point).map((value) => value.toFixed(1)).join(","));
      canvas.append(svg("polyline", { points: corners.join(" "), class: "cfx-map-trail" }));
      for (const { index, point } of trail) {
        const mark = dot(canvas, at(point), index === now ? 5.5 : 3, index === now ? "cfx-map-now" : "cfx-map-past");
        mark.append(svg("title", { text: stage.say("map.round", { n: index }) }));
        mark.addEventListener("click", () => stage.jumpTo(lane, index));
      }
      node.append(canvas, el("p", { class: "cfx-quiet", text: stage.say("map.note") }));
      return node;
    }

    function dot(canvas, [x, y], radius, look) {
      const mark = svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: radius, class: look });
      canvas.append(mark);
      return mark;
    }

    return { draw };
  }

  return { create };
})(confuDom, confuLayout);
