// The race: one row of bars per lane, its figures, and whether all wrote the same text.

const confuRace = (({ el, svg, sign, sentence, memory }, layout) => {
  const NEAR_TIE = 0.05; // logits: below this, rounding may decide

  function create(stage, box, verdict) {
    const { state } = stage;
    const changed = memory();
    let rows = {}; // lane -> the row's parts; a streamed round adds one bar to one row

    function draw() {
      const { run, view } = state;
      if (changed("rows", run.id, view.align, stage.speech.language)) build();
      const scale = scaleOf(run);
      for (const lane of run.lanes) drawRow(lane, rows[lane.name], scale);
      drawVerdict();
    }

    function build() {
      const about = { tau: "tau", passes: "pass", rows: "rows" };
      const heads = ["tau", "passes", "rows", "seconds"].map((name) =>
        el("span", {}, stage.say(`race.${name}`), about[name] && stage.ask(about[name])));
      box.replaceChildren(el("div", { class: "cfx-race-head" },
        el("span"), el("span", { text: stage.say(`race.axis_${state.view.align}`) }), ...heads));
      rows = Object.fromEntries(state.run.lanes.map((lane) => [lane.name, buildRow(lane)]));
      box.append(...Object.values(rows).map((row) => row.node));
    }

    /** In which units bars stand. While a run goes on, the length that was asked for sets the width
     * before any lane is done, so that bars only ever add up. */
    function scaleOf(run) {
      const scale = layout.timelineScale(run.lanes);
      if (run.state === "running") {
        const asked = run.header.settings.max_new_tokens;
        scale.rounds = Math.max(scale.rounds, run.lanes.some((lane) => !state.isTree(lane)) ? asked : asked / 2);
        scale.tokens = Math.max(scale.tokens, asked);
      }
      const widths = { round: scale.rounds, text: scale.tokens, time: scale.seconds };
      return { ...scale, key: [widths[state.view.align], scale.tallest] };
    }

    function buildRow(lane) {
      const row = {
        changed: memory(),
        bars: [],
        cursor: svg("rect", { y: 0, height: 36, class: "cfx-cursor" }),
        canvas: svg("svg", { viewBox: "0 0 1000 36", preserveAspectRatio: "none", class: "cfx-bars", "aria-hidden": "true" }),
        tau: el("span", { class: "cfx-figure cfx-tau" }),
        passes: el("span", { class: "cfx-figure" }),
        width: el("span", { class: "cfx-figure cfx-rows" }),
        seconds: el("span", { class: "cfx-figure" }),
        spoken: el("span", { class: "cfx-spoken" }),
        error: el("p", { class: "cfx-lane-error", hidden: true }),
      };
      row.canvas.append(row.cursor);
      row.node = el("div", { class: `cfx-race-row cfx-m-${stage.look(lane)}`, "data-lane": lane.name },
        el("span", { class: "cfx-name" }, sign(stage.look(lane)), el("b", { text: stage.name(lane) }),
          lane.head && !lane.head.trained && el("span", { class: "cfx-flag", text: stage.say("race.untrained") })),
        row.canvas, row.tau, row.passes, row.width, row.seconds, row.spoken, row.error);
      const roundAt = (event) => {
        const frame = row.canvas.getBoundingClientRect();
        const at = (event.clientX - frame.left) / frame.width;
        const bars = layout.bars(state.laneOf(lane.name).rounds, state.view.align, scaleOf(state.run));
        return bars.findIndex((bar) => bar.x <= at && at < bar.x + bar.width);
      };
      // The whole height over a bar is its button.
      row.canvas.addEventListener("click", (event) => {
        const index = roundAt(event);
        if (index >= 0) stage.jumpTo(state.laneOf(lane.name), index);
      });
      row.canvas.addEventListener("pointermove", (event) => {
        const index = roundAt(event);
        if (index >= 0 && stage.hasMoved(event)) stage.point({ lane: lane.name, round: index, node: null });
      });
      row.canvas.addEventListener("pointerleave", stage.unpoint);
      return row;
    }

    function drawRow(lane, row, scale) {
      if (row.changed("figures", lane.rounds.length, lane.error)) {
        const figures = layout.speedOf(lane.rounds);
        row.tau.textContent = figures.passes ? figures.tau.toFixed(2) : "–";
        row.passes.textContent = String(figures.passes);
        row.width.textContent = figures.passes ? figures.rows.toFixed(figures.rows < 10 ? 1 : 0) : "–";
        row.seconds.textContent = `${figures.seconds.toFixed(figures.seconds < 10 ? 2 : 1)} s`;
        row.spoken.textContent = stage.say("race.spoken", {
          tau: figures.tau.toFixed(2), passes: figures.passes, tokens: figures.tokens, seconds: figures.seconds.toFixed(2),
        });
        row.error.textContent = lane.error || "";
        row.error.hidden = !lane.error;
      }
      const moved = row.changed("scale", scale.key);
      if (moved || row.bars.length !== lane.rounds.length) drawBars(lane, row, scale, moved ? 0 : row.bars.length);
      if (row.changed("marks", lane.rounds.length, state.current(lane), state.pointedRound(lane), moved)) drawMarks(lane, row);
    }

    /** Bars from round `first` on; those before it stand where they stood. */
    function drawBars(lane, row, scale, first) {
      const places = layout.bars(lane.rounds, state.view.align, scale);
      for (let index = first; index < places.length; index++) {
        const place = places[index];
        const height = Math.max(3, 32 * place.height);
        const inset = Math.min(1.2, place.width * 120);
        const bar = row.bars[index] || svg("rect", { "data-round": index });
        bar.setAttribute("x", place.x * 1000 + inset);
        bar.setAttribute("y", 35 - height);
        bar.setAttribute("width", Math.max(0.8, place.width * 1000 - 2 * inset));
        bar.setAttribute("height", height);
        if (!row.bars[index]) row.canvas.append(bar);
        row.bars[index] = bar;
      }
      for (const bar of row.bars.splice(places.length)) bar.remove();
    }

    function drawMarks(lane, row) {
      const lead = state.run.lanes[0];
      const difference = lane === lead ? null : layout.firstDifference(lead, lane);
      const off = difference ? layout.roundAt(lane.rounds, difference.index, "text") : -1;
      const shown = state.current(lane);
      const pointed = state.pointedRound(lane);
      for (const side of ["x", "width"]) row.cursor.setAttribute(side, row.bars[shown] ? row.bars[shown].getAttribute(side) : 0);
      row.bars.forEach((bar, index) => {
        const marks = [index === shown && " cfx-now", index === pointed && " cfx-pointed", index === off && " cfx-off"];
        const look = `cfx-bar${marks.filter(Boolean).join("")}`;
        if (bar.getAttribute("class") !== look) bar.setAttribute("class", look);
      });
    }

    function drawVerdict() {
      const { run } = state;
      if (!changed("verdict", run.id, run.state, stage.speech.language, run.lanes.map((lane) => lane.rounds.length))) return;
      const [lead, ...others] = run.lanes;
      const lines = [];
      for (const lane of others) {
        const found = layout.firstDifference(lead, lane);
        if (!found) continue;
        const key = found.margin < NEAR_TIE ? "verdict.near_tie" : "verdict.different";
        lines.push(sentence("p", { class: "cfx-differs" }, ["≠ ", ...stage.speech.parts(key, {
          lane: stage.name(lane), lead: stage.name(lead), index: found.index + 1,
          text_a: { token: found.textA }, text_b: { token: found.textB }, margin: found.margin.toFixed(3),
        })]));
      }
      if (others.length && !lines.length) {
        const shared = Math.min(...run.lanes.map((lane) => layout.tokensOf(lane.rounds).length));
        const sampled = run.header.settings.temperature > 0;
        const key = run.state !== "finished" ? "verdict.same_so_far" : sampled ? "verdict.same_sampled" : "verdict.same";
        lines.push(el("p", { class: "cfx-same", text: `✓ ${stage.say(key, { n: shared, lanes: run.lanes.length, seed: run.header.settings.seed })}` }));
      }
      verdict.replaceChildren(...lines);
    }

    return { draw };
  }

  return { create };
})(confuDom, confuLayout);
