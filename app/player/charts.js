// The page's charts and the player show one another's round: a click on a chart moves the slider, and
// the round on show is marked in the chart. The marks are drawn over Plotly's picture, which stays
// as it is: redrawing it would cost a hundred times as much.
//
// A trace of a chart says in `meta` whose rounds it shows: {run, lane, rounds}, one round (or null)
// per column or point.

const confuCharts = (({ svg, memory }) => {
  const RING = 9;

  /** @param place id of the element that holds the charts; none on a saved page. */
  function create(stage, place) {
    const { state } = stage;
    const overlays = new WeakMap(); // picture -> its overlay
    // Charts come and go with their tabs.
    const watcher = new MutationObserver(() => stage.invalidate());
    let holder = null; // comes to the page after the player

    function find() {
      if (!place || (holder && holder.isConnected)) return;
      watcher.disconnect();
      holder = document.getElementById(place);
      if (holder) watcher.observe(holder, { childList: true, subtree: true });
    }

    function draw() {
      find();
      if (!holder) return;
      for (const picture of holder.querySelectorAll(".js-plotly-plot")) {
        if (!picture._fullLayout || !picture._fullLayout.xaxis || !linked(picture).length) continue;
        let overlay = overlays.get(picture);
        if (!overlay || overlay.canvas.parentNode !== picture) {
          overlay = connect(picture);
          overlays.set(picture, overlay);
        }
        mark(picture, overlay);
      }
    }

    /** The traces of a chart that show rounds of the run in the player. */
    function linked(picture) {
      const created = state.run && state.run.header.created;
      return (picture.data || []).filter((trace) => trace.meta && trace.meta.run === created && state.laneOf(trace.meta.lane));
    }

    function connect(picture) {
      const act = (event, then) => {
        const point = event.points && event.points[0];
        const trace = point && linked(picture).find((one) => one === point.data);
        if (!trace) return;
        const at = Array.isArray(point.pointNumber) ? point.pointNumber[1] : point.pointNumber;
        const round = trace.meta.rounds[at];
        if (Number.isInteger(round)) then(state.laneOf(trace.meta.lane), round);
      };
      picture.on("plotly_click", (event) => act(event, (lane, round) => stage.jumpTo(lane, round)));
      picture.on("plotly_hover", (event) => act(event, (lane, round) => stage.point({ lane: lane.name, round, node: null })));
      picture.on("plotly_unhover", stage.unpoint);
      const overlay = { canvas: svg("svg", { class: "cfx-over", "aria-hidden": "true" }), changed: memory() };
      picture.append(overlay.canvas);
      picture.on("plotly_afterplot", () => mark(picture, overlay));
      return overlay;
    }

    function mark(picture, { canvas, changed }) {
      const { xaxis: x, yaxis: y } = picture._fullLayout;
      const rounds = linked(picture).map((trace) => {
        const lane = state.laneOf(trace.meta.lane);
        return { trace, now: state.current(lane), pointed: state.pointedRound(lane) };
      });
      const frame = [x._offset, y._offset, x._length, y._length, x.range, y.range];
      if (!changed("marks", frame, rounds.map(({ now, pointed }) => [now, pointed]))) return;
      const [left, top, width, height] = frame;
      canvas.setAttribute("style", `left:${left}px;top:${top}px;width:${width}px;height:${height}px`);
      const at = (horizontal, vertical) => [x.l2p(horizontal), y.l2p(vertical)];
      canvas.replaceChildren(...rounds.flatMap((entry) =>
        entry.trace.type === "heatmap" ? columns(entry, x, height) : points(entry, at)));
    }

    /** The shown column framed, the one pointed at framed with dashes. */
    function columns({ trace, now, pointed }, x, height) {
      return [[now, "now"], [pointed, "pointed"]].flatMap(([round, kind]) => {
        const column = trace.meta.rounds.indexOf(round);
        if (column < 0) return [];
        const [from, to] = [x.l2p(column - 0.5), x.l2p(column + 0.5)];
        return [svg("rect", { x: from, y: 1.5, width: to - from, height: height - 3, class: `cfx-over-${kind}` })];
      });
    }

    /** The trail up to the shown round drawn strongly, that round ringed, the pointed one with dashes. */
    function points({ trace, now, pointed }, at) {
      const place = (index) => at(trace.x[index], trace.y[index]);
      const until = trace.meta.rounds.flatMap((round, index) => (round !== null && round <= now ? [place(index)] : []));
      const ring = (round, kind) => {
        const index = trace.meta.rounds.indexOf(round);
        if (index < 0) return [];
        const [cx, cy] = place(index);
        return [svg("circle", { cx, cy, r: RING, class: `cfx-over-${kind}` })];
      };
      const line = trace.meta.trail ? [svg("polyline", { points: until.map((pair) => pair.join(",")).join(" "), class: "cfx-over-trail" })] : [];
      return [...line, ...ring(now, "now"), ...ring(pointed, "pointed")];
    }

    return { draw };
  }

  return { create };
})(confuDom);
