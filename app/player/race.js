// The race: one row of bars per lane, its figures, and whether all wrote the same text.

const confuRace = (({ el, svg, sign, sentence }, layout) => {
  const NEAR_TIE = 0.05; // logits: below this, rounding may decide

  function create(stage, box, verdict) {
    const { state } = stage;
    let rows = {}; // lane -> {node, key}: a row is painted anew only if it changed
    let headed = "";

    function draw() {
      const { run, view } = state;
      const scale = layout.timelineScale(run.lanes);
      if (run.state === "running") {
        // The asked length sets the width before any lane is done, so that bars only ever add up.
        const asked = run.header.settings.max_new_tokens;
        scale.rounds = Math.max(scale.rounds, run.lanes.some((lane) => !state.isTree(lane)) ? asked : asked / 2);
        scale.tokens = Math.max(scale.tokens, asked);
      }
      const common = JSON.stringify([run.id, view.align, stage.speech.language]);
      if (common !== headed) {
        headed = common;
        rows = {};
        const heads = ["tau", "passes", "seconds"].map((name) => el("span", { text: stage.say(`race.${name}`) }));
        box.replaceChildren(el("div", { class: "cfx-race-head", "aria-hidden": "true" },
          el("span"), el("span", { text: stage.say(`race.axis_${view.align}`) }), ...heads));
      }
      for (const lane of run.lanes) drawRow(lane, scale);
      drawVerdict();
    }

    function drawRow(lane, scale) {
      const key = JSON.stringify([lane.rounds.length, state.current(lane), lane.error, scale]);
      const old = rows[lane.name];
      if (old && old.key === key) return;
      const node = row(lane, scale);
      if (old) old.node.replaceWith(node);
      else box.append(node);
      rows[lane.name] = { node, key };
    }

    function row(lane, scale) {
      const lead = state.run.lanes[0];
      const figures = layout.speedOf(lane.rounds);
      const node = el("div", { class: `cfx-race-row cfx-m-${stage.look(lane)}`, "data-lane": lane.name },
        el("span", { class: "cfx-name" }, sign(stage.look(lane)), el("b", { text: stage.name(lane) })),
        strip(lane, scale, lane === lead ? null : layout.firstDifference(lead, lane)),
        el("span", { class: "cfx-figure cfx-tau", text: figures.passes ? figures.tau.toFixed(2) : "–" }),
        el("span", { class: "cfx-figure", text: String(figures.passes) }),
        el("span", { class: "cfx-figure", text: `${figures.seconds.toFixed(figures.seconds < 10 ? 2 : 1)} s` }),
        el("span", { class: "cfx-spoken", text: stage.say("race.spoken", { tau: figures.tau.toFixed(2), passes: figures.passes, tokens: figures.tokens, seconds: figures.seconds.toFixed(2) }) }));
      if (lane.error) node.append(el("p", { class: "cfx-lane-error", text: lane.error }));
      return node;
    }

    function strip(lane, scale, difference) {
      const begins = layout.starts(lane.rounds);
      const shown = state.current(lane);
      const canvas = svg("svg", { viewBox: "0 0 1000 36", preserveAspectRatio: "none", class: "cfx-bars", "aria-hidden": "true" });
      layout.bars(lane.rounds, state.view.align, scale).forEach((bar, index) => {
        const height = Math.max(3, 32 * bar.height);
        const inset = Math.min(1.2, bar.width * 120);
        const end = begins[index] + lane.rounds[index].tokens.length;
        const off = difference && begins[index] <= difference.index && difference.index < end;
        canvas.append(svg("rect", {
            x: bar.x * 1000 + inset, y: 35 - height, width: Math.max(0.8, bar.width * 1000 - 2 * inset), height,
            class: `cfx-bar${index === shown ? " cfx-now" : ""}${off ? " cfx-off" : ""}`, "data-round": index,
        }));
      });
      // The whole height over a bar is its button.
      canvas.addEventListener("click", (event) => {
        const frame = canvas.getBoundingClientRect();
        const at = (event.clientX - frame.left) / frame.width;
        const bars = layout.bars(lane.rounds, state.view.align, scale);
        const index = bars.findIndex((bar) => bar.x <= at && at < bar.x + bar.width);
        if (index >= 0) stage.jumpTo(lane, index);
      });
      return canvas;
    }

    function drawVerdict() {
      const { run } = state;
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
