// The step player: keeps the rounds it has received, shows one position, and paints it.
//
// Messages are JSON strings {run, seq, kind, ...}: `reset` starts a run, `step` adds one round to one
// lane, `full` replaces everything, `error` and `language` carry what they say. History lives here:
// moving through the rounds asks nobody.

function confuPlayer(element, assets, host) {
  const { el, svg, icon, token, sign, sentence } = confuDom;
  const layout = confuLayout;
  const PHASES = ["draft", "check", "accept", "append"];
  const PHASE_TIME = [1100, 800, 1000, 700];
  const ROWS = 11; // of the folded tree; in the outline of narrow pages a row is a single line
  const OUTLINE_ROWS = 16;
  const NARROW = 800;

  let run = null;
  let speech = confuStory.speaker("en", assets.strings.en, assets.strings.en);
  let timer = null;
  let frame = 0;
  let known = ""; // what the last painting of the race was made from
  let pending = null; // the round a link asks for, until a run has finished

  const view = {
    position: 0,
    follow: true,
    align: "round",
    phase: 4,
    speed: 1,
    playing: false,
    animate: false,
    selected: null, // {lane, round, node}
    pinned: false,
    solo: null,
    expanded: new Set(),
    open: {}, // per lane and round: nodes whose folded children are shown
    table: false,
    budget: {}, // per lane: nodes of the smaller tree, or null
    predict: { on: false, guess: {}, right: 0, asked: 0, counted: new Set() },
    hidden: new Set(),
    spot: null, // what the tour points at, as a selector
  };

  const say = (key, parameters) => speech.say(key, parameters);

  // ---- The fixed skeleton ------------------------------------------------------------------

  const parts = {
    badge: el("span", { class: "cfx-badge" }),
    title: el("span", { class: "cfx-title" }),
    meta: el("span", { class: "cfx-meta" }),
    actions: el("div", { class: "cfx-actions" }),
    notice: el("div", { class: "cfx-notice", role: "alert", hidden: true }),
    race: el("div", { class: "cfx-race" }),
    verdict: el("div", { class: "cfx-verdict" }),
    transport: el("div", { class: "cfx-transport", role: "group" }),
    phases: el("div", { class: "cfx-phases" }),
    panels: el("div", { class: "cfx-panels" }),
    future: el("section", { class: "cfx-future" }),
    plain: el("details", { class: "cfx-plain" }),
    card: el("section", { class: "cfx-card" }),
    legend: el("div", { class: "cfx-legend" }),
    spoken: el("div", { class: "cfx-spoken", "aria-live": "polite" }),
    dialog: el("dialog", { class: "cfx-dialog" }),
    empty: el("div", { class: "cfx-empty" }),
  };
  const root = el(
    "section",
    { class: "cfx", tabindex: "-1" },
    el("header", { class: "cfx-top" }, parts.badge, el("div", { class: "cfx-heading" }, parts.title, parts.meta), parts.actions),
    parts.notice,
    parts.empty,
    el("div", { class: "cfx-stage" }, parts.race, parts.verdict, parts.transport, parts.phases, parts.panels, parts.future, parts.plain, parts.card, parts.legend),
    parts.spoken,
    parts.dialog,
  );
  const style = el("style", { text: assets.css });
  const controls = {};
  let panels = {};

  function button(name, key, action, content) {
    const node = el("button", { type: "button", class: `cfx-button cfx-${name}`, onclick: action });
    node.append(content || "");
    node.dataset.key = key;
    return node;
  }

  function buildTransport() {
    const step = (name, action) => button(name, `transport.${name}`, action, icon(name));
    controls.play = step("play", togglePlay);
    controls.slider = el("input", {
      type: "range", min: 0, max: 0, step: 1, value: 0, class: "cfx-slider",
      oninput: () => goTo(Number(controls.slider.value)),
    });
    controls.count = el("output", { class: "cfx-count" });
    controls.speed = el("select", {
      class: "cfx-select", onchange: () => { view.speed = Number(controls.speed.value); },
    }, ...[0.5, 1, 2, 4].map((value) => el("option", { value, text: `${value}×`, selected: value === 1 })));
    controls.live = button("live", "transport.live", followLive);
    controls.align = el("select", { class: "cfx-select", onchange: () => setAlign(controls.align.value) });
    parts.transport.replaceChildren(
      el("div", { class: "cfx-keys" },
        step("first", () => goTo(0)), step("back", () => goTo(view.position - 1)), controls.play,
        step("forward", () => goTo(view.position + 1)), step("last", () => goTo(limit()))),
      controls.slider, controls.count, controls.live,
      el("label", { class: "cfx-field" }, el("span", { "data-key": "transport.speed" }), controls.speed),
      el("label", { class: "cfx-field" }, el("span", { "data-key": "transport.align" }), controls.align),
    );
  }

  function buildActions() {
    controls.predict = button("predict", "predict.toggle", togglePredict);
    controls.table = button("tables", "action.table", () => toggleTable());
    const entry = (key, action) => button("entry", key, () => { controls.menu.open = false; action(); });
    controls.menu = el("details", { class: "cfx-menu" },
      el("summary", { class: "cfx-button", "data-key": "action.export" }),
      el("div", { class: "cfx-menu-list" },
        entry("export.trace", () => confuExport.trace(run)),
        entry("export.page", () => confuExport.page(run, assets, speech, host.source)),
        entry("export.svg", () => withTree((canvas, name) => confuExport.picture(canvas, name))),
        entry("export.png", () => withTree((canvas, name) => confuExport.bitmap(canvas, name))),
        host.openFile && entry("export.open", () => controls.file.click())));
    controls.file = el("input", {
      type: "file", accept: ".json,application/json", hidden: true, tabindex: "-1",
      onchange: () => { openFile(controls.file.files[0]); controls.file.value = ""; },
    });
    controls.link = host.share && button("link", "action.link", copyLink);
    controls.tour = button("tour", "action.tour", () => confuTour.start(tourStage()));
    parts.actions.replaceChildren(
      ...[controls.tour, controls.predict, controls.table, controls.link, controls.menu,
        button("words", "action.glossary", () => openDialog("glossary")),
        button("help", "action.help", () => openDialog("help"), "?"), controls.file].filter(Boolean));
  }

  /** Put every sentence of the fixed parts in the current language. */
  function translate() {
    root.setAttribute("lang", speech.language);
    root.setAttribute("aria-label", say("player.label"));
    for (const node of root.querySelectorAll("[data-key]")) {
      const words = say(node.dataset.key);
      if (node.tagName === "BUTTON" && node.querySelector("svg")) {
        node.setAttribute("aria-label", words);
        node.title = words;
      } else if (node.classList.contains("cfx-help")) node.setAttribute("aria-label", words);
      else node.textContent = words;
    }
    parts.transport.setAttribute("aria-label", say("transport.label"));
    controls.slider.setAttribute("aria-label", say("transport.slider"));
    controls.align.replaceChildren(
      ...["round", "text", "time"].map((value) => el("option", { value, text: say(`align.${value}`), selected: value === view.align })));
    parts.empty.replaceChildren(el("p", { text: say("player.empty") }));
    drawLegend();
    known = "";
    invalidate();
  }

  // ---- Messages ----------------------------------------------------------------------------

  function receive(text) {
    let message;
    try { message = JSON.parse(text); } catch { return; }
    if (!message || typeof message !== "object") return;
    if (message.language) setLanguage(message.language);
    if (message.hide) view.hidden = new Set(message.hide);
    if (message.kind === "language" && message.step !== undefined) pending = message.step;
    if (message.kind === "reset") begin(message);
    else if (message.kind === "step") advance(message);
    else if (message.kind === "full") replace(message);
    else if (message.kind === "error") notify(message.message);
    invalidate();
  }

  function begin(message) {
    stopPlaying();
    const header = message.trace;
    run = {
      id: message.run, seq: message.seq, broken: false, source: message.source,
      state: "running", header, lanes: [],
    };
    for (const name of Object.keys(header.lanes)) {
      const { method, head, rounds, text, error } = header.lanes[name];
      run.lanes.push({ name, method, head, rounds: rounds.slice(), text, error });
    }
    Object.assign(view, { position: 0, follow: true, phase: 4, selected: null, pinned: false, open: {}, budget: {}, animate: false });
    Object.assign(view.predict, { guess: {}, right: 0, asked: 0, counted: new Set() });
    if (view.solo && !laneOf(view.solo)) view.solo = null;
    notify("");
    panels = {};
    parts.panels.replaceChildren();
    known = "";
  }

  function advance(message) {
    if (!run || message.run !== run.id || run.broken) return;
    if (message.seq !== run.seq + 1) {
      run.broken = true; // a hole: wait for `full`
      return;
    }
    run.seq = message.seq;
    const lane = laneOf(message.lane);
    if (!lane || lane.rounds.length !== message.record.index) return;
    lane.rounds.push(message.record);
    lane.text = message.text;
  }

  function replace(message) {
    const same = run && run.id === message.run;
    const kept = same ? { position: view.position, follow: view.follow, selected: view.selected, pinned: view.pinned, phase: view.phase, open: view.open } : null;
    const playing = same && view.playing;
    begin({ ...message });
    run.state = message.state;
    if (kept) Object.assign(view, kept);
    else {
      view.follow = false;
      view.position = Math.min(message.position ?? bestRound(), limit());
    }
    if (pending !== null && view.follow) {
      view.position = Math.min(pending, limit());
      view.follow = false;
      pending = null;
    }
    if (playing) togglePlay();
  }

  function notify(text) {
    parts.notice.textContent = text || "";
    parts.notice.hidden = !text;
  }

  function setLanguage(language) {
    if (!assets.strings[language] || language === speech.language) return;
    speech = confuStory.speaker(language, assets.strings[language], assets.strings.en);
    translate();
  }

  // ---- Where we are --------------------------------------------------------------------------

  const laneOf = (name) => run && run.lanes.find((lane) => lane.name === name);
  const isTree = (lane) => lane.method !== "plain";
  const treeLanes = () => (run ? run.lanes.filter(isTree) : []);
  const panelLanes = () => (treeLanes().length ? treeLanes() : run ? run.lanes : []);

  function limit() {
    if (!run) return 0;
    if (view.align === "text") return Math.max(0, ...run.lanes.map((lane) => layout.tokensOf(lane.rounds).length - 1));
    return Math.max(0, ...panelLanes().map((lane) => lane.rounds.length - 1));
  }

  /** Where a run that nobody has watched opens: the round in which the lanes gained most. */
  function bestRound() {
    const gain = (index) => panelLanes().reduce((sum, lane) => sum + (lane.rounds[index] ? lane.rounds[index].tokens.length : 0), 0);
    let best = 0;
    for (let index = 1; index <= limit(); index++) if (gain(index) > gain(best)) best = index;
    return best;
  }

  /** The round of a lane that is on show. In time order, a lane stands where its clock stands. */
  function current(lane) {
    if (view.follow) return lane.rounds.length - 1;
    if (view.align === "time") {
      const lead = panelLanes()[0];
      const until = lead.rounds.slice(0, view.position + 1).reduce((sum, r) => sum + layout.secondsOf(r), 0);
      if (lane === lead) return Math.min(view.position, lane.rounds.length - 1);
      let used = 0;
      let shown = -1;
      for (const record of lane.rounds) {
        used += layout.secondsOf(record);
        if (used > until + 1e-9) break;
        shown = record.index;
      }
      return Math.max(shown, Math.min(0, lane.rounds.length - 1));
    }
    return layout.roundAt(lane.rounds, view.position, view.align);
  }

  const recordOf = (lane) => lane.rounds[current(lane)];

  function goTo(position, phase = view.predict.on ? 1 : 4) {
    stopPlaying();
    moveTo(position, phase);
    announce();
  }

  function moveTo(position, phase) {
    if (!run) return;
    if (view.follow) settle();
    view.follow = false;
    view.position = Math.max(0, Math.min(position, limit()));
    view.phase = phase;
    view.animate = false;
    if (!view.pinned) view.selected = null;
    view.budget = {};
    view.predict.guess = {};
    invalidate();
  }

  /** Leave the live view: the slider stands where the newest round was. */
  function settle() {
    view.position = limit();
  }

  function followLive() {
    stopPlaying();
    settle();
    view.follow = run && run.state === "running";
    view.phase = 4;
    invalidate();
  }

  function setAlign(align) {
    const lane = panelLanes()[0];
    const index = lane ? current(lane) : 0;
    view.align = align;
    if (lane) view.position = align === "text" ? layout.starts(lane.rounds)[index] || 0 : index;
    invalidate();
  }

  function jumpTo(lane, index, node) {
    stopPlaying();
    if (!isTree(lane) && view.align !== "text") view.align = controls.align.value = "text";
    const position = view.align === "text" ? layout.starts(lane.rounds)[index] : isTree(lane) ? index : view.position;
    view.pinned = false;
    moveTo(position, 4);
    if (node !== undefined) select({ lane: lane.name, round: index, node }, true);
    announce();
  }

  // ---- Playing -------------------------------------------------------------------------------

  const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

  function togglePlay() {
    if (view.playing) {
      stopPlaying();
      invalidate();
      return;
    }
    if (!run || limit() === 0) return;
    if (view.follow) settle();
    if (view.position >= limit() && view.phase === 4) view.position = 0;
    view.follow = false;
    view.playing = true;
    view.phase = still() ? 4 : 1;
    view.animate = !still();
    schedule();
    invalidate();
  }

  function schedule() {
    clearTimeout(timer);
    const wait = still() ? 1800 : PHASE_TIME[view.phase - 1];
    timer = setTimeout(playOn, wait / view.speed);
  }

  function playOn() {
    if (view.phase < 4) view.phase += 1;
    else if (view.position < limit()) {
      view.position += 1;
      view.phase = still() ? 4 : 1;
      if (!view.pinned) view.selected = null;
    } else if (run.state !== "running") {
      stopPlaying();
      invalidate();
      return;
    }
    schedule();
    invalidate();
  }

  function stopPlaying() {
    clearTimeout(timer);
    view.playing = false;
    view.animate = false;
  }

  function showPhase(phase) {
    stopPlaying();
    if (view.follow) settle();
    view.follow = false;
    view.phase = phase;
    invalidate();
  }

  // ---- Selecting -----------------------------------------------------------------------------

  function select(selection, pin) {
    view.selected = selection;
    view.pinned = Boolean(selection && pin);
    invalidate();
  }

  function clearSelection() {
    select(null, false);
  }

  /** The answer position of a selected node, if it became text. */
  function selectedIndex() {
    const chosen = view.selected;
    const lane = chosen && laneOf(chosen.lane);
    const record = lane && lane.rounds[chosen.round];
    if (!record) return -1;
    const start = layout.starts(lane.rounds)[chosen.round];
    if (chosen.node === "bonus") return start + record.tokens.length - 1;
    const step = record.path.indexOf(chosen.node);
    return step >= 0 && step < record.tokens.length ? start + step : -1;
  }

  // ---- Painting ------------------------------------------------------------------------------

  function invalidate() {
    if (!frame) frame = requestAnimationFrame(() => { frame = 0; draw(); });
  }

  function draw() {
    root.classList.toggle("cfx-none", !run);
    root.classList.toggle("cfx-playing", view.animate);
    root.classList.toggle("cfx-narrow", root.clientWidth < NARROW);
    for (const name of ["race", "future", "plain", "card", "legend", "actions"]) {
      parts[name].classList.toggle("cfx-hidden", view.hidden.has(name));
    }
    parts.empty.hidden = Boolean(run);
    controls.table.setAttribute("aria-pressed", String(view.table));
    controls.predict.setAttribute("aria-pressed", String(view.predict.on));
    if (!run) return;
    drawTop();
    drawRace();
    drawVerdict();
    drawTransport();
    drawPhases();
    drawPanels();
    drawFuture();
    drawPlain();
    drawCard();
    for (const node of root.querySelectorAll(".cfx-spot")) node.classList.remove("cfx-spot");
    const spot = view.spot && root.querySelector(view.spot);
    if (spot) spot.classList.add("cfx-spot");
  }

  function drawTop() {
    const { source, header } = run;
    const live = source.kind === "live";
    parts.badge.className = `cfx-badge cfx-badge-${live ? run.state : source.kind}`;
    parts.badge.textContent = say(live ? `badge.${run.state}` : `badge.${source.kind}`);
    parts.title.replaceChildren(el("q", { text: layout.visible(header.prompt, 160).replaceAll("␣", " ") }));
    const where = { model: header.target.name, device: header.target.device, dtype: header.target.dtype };
    const settings = {
      ...where, temperature: header.settings.temperature, seed: header.settings.seed,
      nodes: header.settings.nodes, depth: header.settings.depth, top_k: header.settings.top_k,
      date: header.created.slice(0, 10),
    };
    parts.meta.textContent = say(live ? "meta.live" : "meta.recorded", settings);
  }

  function drawRace() {
    const scale = layout.timelineScale(run.lanes);
    // The plain lane sets the width before any lane is done: bars then only ever grow to the right.
    const asked = run.header.settings.max_new_tokens;
    if (run.state === "running") {
      scale.rounds = Math.max(scale.rounds, run.lanes.some((lane) => !isTree(lane)) ? asked : asked / 2);
      scale.tokens = Math.max(scale.tokens, asked);
    }
    const key = JSON.stringify([run.id, run.state, view.align, run.lanes.map((lane) => [lane.rounds.length, current(lane), lane.error]), speech.language]);
    if (key === known) return;
    known = key;
    const lead = run.lanes[0];
    parts.race.replaceChildren(
      el("div", { class: "cfx-race-head", "aria-hidden": "true" },
        el("span"), el("span", { text: say(`race.axis_${view.align}`) }),
        el("span", { text: say("race.tau") }), el("span", { text: say("race.passes") }), el("span", { text: say("race.seconds") })),
      ...run.lanes.map((lane) => raceRow(lane, scale, lead)),
    );
  }

  function raceRow(lane, scale, lead) {
    const figures = layout.speedOf(lane.rounds);
    const shown = current(lane);
    const difference = lane === lead ? null : layout.firstDifference(lead, lane);
    const begins = layout.starts(lane.rounds);
    const strip = svg("svg", { viewBox: "0 0 1000 36", preserveAspectRatio: "none", class: "cfx-bars", "aria-hidden": "true" });
    layout.bars(lane.rounds, view.align, scale).forEach((bar, index) => {
      const height = Math.max(3, 32 * bar.height);
      const inset = Math.min(1.2, bar.width * 120);
      const off = difference && begins[index] <= difference.index && difference.index < begins[index] + lane.rounds[index].tokens.length;
      strip.append(
        svg("rect", { x: bar.x * 1000, y: 0, width: Math.max(1, bar.width * 1000), height: 36, class: "cfx-bar-hit", "data-round": index }),
        svg("rect", {
          x: bar.x * 1000 + inset, y: 35 - height, width: Math.max(0.8, bar.width * 1000 - 2 * inset), height,
          class: `cfx-bar${index === shown ? " cfx-now" : ""}${off ? " cfx-off" : ""}`, "data-round": index,
        }));
    });
    strip.addEventListener("click", (event) => {
      const index = event.target.dataset && event.target.dataset.round;
      if (index !== undefined) jumpTo(lane, Number(index));
    });
    const row = el("div", { class: `cfx-race-row cfx-m-${lane.method}`, "data-lane": lane.name },
      el("span", { class: "cfx-name" }, sign(lane.method), el("b", { text: say(`method.${lane.method}`) })),
      strip,
      el("span", { class: "cfx-figure cfx-tau", text: figures.passes ? figures.tau.toFixed(2) : "–" }),
      el("span", { class: "cfx-figure", text: String(figures.passes) }),
      el("span", { class: "cfx-figure", text: `${figures.seconds.toFixed(figures.seconds < 10 ? 2 : 1)} s` }),
      el("span", { class: "cfx-spoken", text: say("race.spoken", { tau: figures.tau.toFixed(2), passes: figures.passes, tokens: figures.tokens, seconds: figures.seconds.toFixed(2) }) }));
    if (lane.error) row.append(el("p", { class: "cfx-lane-error", text: lane.error }));
    return row;
  }

  function drawVerdict() {
    const lead = run.lanes[0];
    const others = run.lanes.slice(1);
    if (!others.length) {
      parts.verdict.replaceChildren();
      return;
    }
    const lines = [];
    const differing = others.filter((lane) => layout.firstDifference(lead, lane));
    for (const lane of differing) {
      const found = layout.firstDifference(lead, lane);
      const key = found.margin < 0.05 ? "verdict.near_tie" : "verdict.different";
      lines.push(sentence("p", { class: "cfx-differs" }, ["≠ ", ...speech.parts(key, {
        lane: say(`method.${lane.method}`), lead: say(`method.${lead.method}`), index: found.index + 1,
        text_a: { token: found.textA }, text_b: { token: found.textB }, margin: found.margin.toFixed(3),
      })]));
    }
    if (!differing.length) {
      const shared = Math.min(...run.lanes.map((lane) => layout.tokensOf(lane.rounds).length));
      const done = run.state === "finished";
      const temperature = run.header.settings.temperature;
      const key = !done ? "verdict.same_so_far" : temperature > 0 ? "verdict.same_sampled" : "verdict.same";
      lines.push(el("p", { class: "cfx-same", text: `✓ ${say(key, { n: shared, lanes: run.lanes.length, seed: run.header.settings.seed })}` }));
    }
    parts.verdict.replaceChildren(...lines);
  }

  function drawTransport() {
    const end = limit();
    const at = view.follow ? end : view.position;
    controls.slider.max = end;
    controls.slider.value = at;
    controls.slider.style.setProperty("--done", `${end ? (100 * at) / end : 0}%`);
    const gains = panelLanes().map((lane) => {
      const record = recordOf(lane);
      return say("transport.gain", { method: say(`method.${lane.method}`), n: record ? record.tokens.length : 0 });
    });
    const place = say(view.align === "text" ? "transport.at_token" : "transport.at_round", {
      at: view.align === "text" ? at + 1 : at, end: view.align === "text" ? end + 1 : end,
    });
    controls.count.textContent = place;
    controls.slider.setAttribute("aria-valuetext", `${place}: ${gains.join(", ")}`);
    controls.play.replaceChildren(icon(view.playing ? "pause" : "play"));
    const words = say(view.playing ? "transport.pause" : "transport.play");
    controls.play.setAttribute("aria-label", words);
    controls.play.title = words;
    controls.live.hidden = run.state !== "running";
    controls.live.setAttribute("aria-pressed", String(view.follow));
  }

  function drawPhases() {
    const record = panelLanes().map(recordOf).find((r) => r);
    const usable = record && record.tree.token_ids.length > 1;
    parts.phases.classList.toggle("cfx-muted", !usable);
    if (!parts.phases.children.length) {
      controls.phases = PHASES.map((name, i) =>
        el("button", { type: "button", class: "cfx-phase", "data-phase": i + 1, onclick: () => showPhase(i + 1) }));
      controls.hint = el("p", { class: "cfx-hint" });
      parts.phases.replaceChildren(el("div", { class: "cfx-phase-row", role: "group" }, ...controls.phases), controls.hint);
    }
    parts.phases.firstChild.setAttribute("aria-label", say("phase.label"));
    controls.phases.forEach((node, i) => {
      node.replaceChildren(el("span", { class: "cfx-number", text: i + 1 }), say(`phase.${PHASES[i]}`));
      node.setAttribute("aria-pressed", String(view.phase === i + 1));
    });
    let hint = usable ? say(`phase.hint_${PHASES[view.phase - 1]}`) : say("phase.hint_prefill");
    if (view.predict.on && usable) hint = predictHint();
    controls.hint.textContent = hint;
  }

  function drawPanels() {
    const lanes = panelLanes();
    const names = lanes.map((lane) => lane.name).join();
    if (parts.panels.dataset.lanes !== names || Object.keys(panels).length !== lanes.length) {
      parts.panels.dataset.lanes = names;
      panels = {};
      parts.panels.replaceChildren(panelSwitch(lanes), ...lanes.map(buildPanel));
    }
    const narrow = root.clientWidth < NARROW;
    const alone = lanes.length === 1 ? lanes[0].name : view.solo || (narrow && lanes.length ? view.tab || lanes[lanes.length - 1].name : null);
    parts.panels.classList.toggle("cfx-one", Boolean(alone) || lanes.length === 1);
    for (const node of parts.panels.querySelectorAll(".cfx-tab")) {
      node.setAttribute("aria-pressed", String(node.dataset.lane === alone));
    }
    for (const lane of lanes) {
      const panel = panels[lane.name];
      panel.box.hidden = Boolean(alone) && lane.name !== alone;
      if (!panel.box.hidden) drawPanel(lane, panel, narrow);
    }
  }

  function panelSwitch(lanes) {
    return el("div", { class: "cfx-switch", role: "group", "aria-label": say("panel.switch") },
      ...lanes.map((lane) => el("button", {
        type: "button", class: "cfx-tab", "data-lane": lane.name,
        onclick: () => { view.tab = lane.name; if (view.solo) view.solo = lane.name; invalidate(); },
      }, sign(lane.method), say(`method.${lane.method}`))));
  }

  function buildPanel(lane) {
    const panel = {
      gain: el("span", { class: "cfx-gain" }),
      solo: el("button", { type: "button", class: "cfx-small", onclick: () => { view.solo = view.solo === lane.name ? null : lane.name; invalidate(); } }),
      expand: el("button", { type: "button", class: "cfx-small", onclick: () => toggleExpanded(lane.name) }),
      chips: el("div", { class: "cfx-chips", role: "list" }),
      story: el("p", { class: "cfx-story" }),
      tree: el("div", { class: "cfx-canvas", tabindex: "0", "data-lane": lane.name }),
      why: el("p", { class: "cfx-why" }),
      budget: el("details", { class: "cfx-budget" }),
    };
    panel.range = el("input", { type: "range", min: 1, max: 1, value: 1, oninput: () => { view.budget[lane.name] = Number(panel.range.value); invalidate(); } });
    panel.answer = el("p", { class: "cfx-budget-answer", "aria-live": "polite" });
    panel.budget.append(el("summary", { text: say("budget.title") }), panel.range, panel.answer);
    panel.budget.addEventListener("toggle", () => { if (!panel.budget.open) delete view.budget[lane.name]; invalidate(); });
    panel.chips.addEventListener("click", (event) => chipClick(lane, event));
    panel.chips.addEventListener("pointerover", (event) => chipHover(lane, event));
    panel.chips.addEventListener("pointerleave", unhover);
    panel.chips.addEventListener("focusin", (event) => chipHover(lane, event));
    panel.tree.addEventListener("click", (event) => nodeClick(lane, event));
    panel.tree.addEventListener("pointerover", (event) => nodeHover(lane, event));
    panel.tree.addEventListener("pointerleave", unhover);
    panel.tree.addEventListener("keydown", (event) => treeKey(lane, event));
    panel.tree.addEventListener("focus", () => treeFocus(lane));
    panel.box = el("section", { class: `cfx-panel cfx-m-${lane.method}`, "data-lane": lane.name, "aria-label": say(`method.${lane.method}`) },
      el("header", { class: "cfx-panel-head" }, sign(lane.method), el("h3", { text: say(`method.${lane.method}`) }), panel.gain, panel.solo, panel.expand),
      panel.chips, panel.story, panel.tree, panel.why, panel.budget);
    panels[lane.name] = panel;
    return panel.box;
  }

  function drawPanel(lane, panel, narrow) {
    const index = current(lane);
    const record = lane.rounds[index];
    panel.solo.textContent = say(view.solo === lane.name ? "panel.both" : "panel.solo");
    panel.solo.hidden = narrow || panelLanes().length < 2;
    const expanded = view.expanded.has(lane.name);
    panel.expand.textContent = say(expanded ? "panel.shrink" : "panel.expand");
    panel.box.classList.toggle("cfx-expanded", expanded);
    if (!record) {
      panel.gain.textContent = "";
      panel.story.textContent = lane.error || say("panel.waiting");
      panel.tree.replaceChildren();
      panel.why.replaceChildren();
      panel.chips.replaceChildren();
      panel.budget.hidden = true;
      return;
    }
    const phase = phaseOf(record);
    const gained = record.tokens.length;
    panel.gain.textContent = phase < 4 ? "" : say("panel.gain", { n: gained, round: index });
    drawChips(lane, panel.chips, index, phase);
    const decided = phase >= 3;
    panel.story.replaceChildren(sentence("span", {}, decided ? confuStory.round(speech, lane, record, run.header.prompt_tokens) : speech.parts(`story.pending_${PHASES[phase - 1]}`, {
      method: say(`method.${lane.method}`), n: record.tree.token_ids.length - 1,
    })));
    panel.why.replaceChildren(sentence("span", {}, decided && record.index > 0 ? confuStory.ending(speech, record) : []));
    drawTree(lane, panel, record, phase, narrow, expanded);
    drawBudget(lane, panel, record, phase);
  }

  const phaseOf = (record) => (record.tree.token_ids.length > 1 ? (view.follow ? 4 : view.phase) : 4);

  function drawTree(lane, panel, record, phase, narrow, expanded) {
    const size = record.tree.token_ids.length;
    const hasTree = size > 0;
    panel.tree.setAttribute("aria-label", say("tree.label", { method: say(`method.${lane.method}`), n: Math.max(0, size - 1) }));
    if (view.table && hasTree) {
      panel.tree.removeAttribute("role");
      panel.tree.removeAttribute("aria-activedescendant");
      panel.tree.replaceChildren(confuTree.table(record, phase, say));
      return;
    }
    if (!hasTree) {
      panel.tree.removeAttribute("role");
      panel.tree.removeAttribute("aria-activedescendant");
      const own = confuStory.bonusOf(record);
      panel.tree.replaceChildren(el("div", { class: "cfx-prefill" },
        el("span", { class: "cfx-prefill-box", text: say(record.index === 0 ? "tree.prompt" : "tree.text", { n: record.index === 0 ? run.header.prompt_tokens : record.position }) }),
        el("span", { class: "cfx-prefill-arrow", text: "→" }),
        own && el("span", { class: "cfx-prefill-token" }, "◆ ", token(own.text, 20))));
      return;
    }
    const chosen = view.selected && view.selected.lane === lane.name && view.selected.round === record.index ? view.selected.node : null;
    const open = view.open[`${lane.name}/${record.index}`] || new Set();
    const keep = typeof chosen === "number" ? layout.lineage(record.tree, chosen) : [];
    const guess = view.predict.guess[lane.name];
    if (guess !== undefined) keep.push(...layout.lineage(record.tree, guess));
    const drawing = confuTree.plan(record, { rows: expanded ? 1000 : narrow ? OUTLINE_ROWS : ROWS, open, keep, outline: narrow });
    const budget = view.budget[lane.name];
    panel.tree.setAttribute("role", "tree");
    const place = `${lane.name}/${record.index}`;
    const moved = panel.tree.dataset.place !== place;
    panel.tree.dataset.place = place;
    confuTree.paint(panel.tree, {
      record, phase, plan: drawing, say, id: `cfx-${lane.name}`, selected: chosen,
      kept: budget ? layout.withBudget(record.tree, record.path, budget).kept : null,
      guess: guess !== undefined && view.predict.on ? new Set(layout.lineage(record.tree, guess)) : null,
    });
    if (moved) showEnd(panel.tree, drawing);
    if (chosen !== null) panel.tree.setAttribute("aria-activedescendant", `cfx-${lane.name}-${chosen}`);
    else panel.tree.removeAttribute("aria-activedescendant");
  }

  /** Scroll a tree that is wider than its panel so that the end of the accepted path is seen. */
  function showEnd(canvas, drawing) {
    const end = drawing.boxes.find((box) => box.kind === "bonus");
    const right = end ? end.x + end.width + 12 : 0;
    canvas.scrollLeft = Math.max(0, right - canvas.clientWidth);
    canvas.scrollTop = end ? Math.max(0, end.y + 60 - canvas.clientHeight) : 0;
  }

  function drawChips(lane, box, index, phase) {
    const begins = layout.starts(lane.rounds);
    const marked = selectedIndex();
    const end = phase < 4 ? begins[index] : begins[index] + lane.rounds[index].tokens.length;
    const chips = [];
    for (let r = 0; r <= index; r++) {
      lane.rounds[r].tokens.forEach((item, i) => {
        const at = begins[r] + i;
        if (at >= end) return;
        const classes = ["cfx-chip", item.origin === "bonus" ? "cfx-chip-target" : "cfx-chip-accepted"];
        if (r === index) classes.push("cfx-new");
        if (at === marked) classes.push("cfx-selected");
        chips.push(el("button", {
          type: "button", role: "listitem", class: classes.join(" "), tabindex: "-1", "data-round": r, "data-step": i,
          "aria-label": say("chip.label", { token: layout.visible(item.text, 60), origin: say(`origin.${item.origin}`), round: r }),
        }, token(item.text, 40)));
        if (/\n/.test(item.text)) chips.push(el("span", { class: "cfx-break", "aria-hidden": "true" }));
      });
    }
    box.replaceChildren(...chips);
    box.scrollTop = box.scrollHeight;
  }

  function drawBudget(lane, panel, record, phase) {
    const size = record.tree.token_ids.length;
    panel.budget.hidden = size < 3 || phase < 4 || view.predict.on;
    if (panel.budget.hidden || !panel.budget.open) return;
    panel.budget.firstChild.textContent = say("budget.title");
    const budget = view.budget[lane.name] || size;
    panel.range.max = size;
    panel.range.value = budget;
    panel.range.setAttribute("aria-label", say("budget.label"));
    const { accepted } = layout.withBudget(record.tree, record.path, budget);
    const gained = Math.min(accepted + 1, Math.max(1, record.tokens.length));
    panel.answer.textContent = say("budget.answer", { drafted: budget - 1, full: size - 1, accepted, n: gained, was: record.tokens.length });
  }

  // Routers and future token of the lanes that contemplate.
  function drawFuture() {
    const lane = run.lanes.find((one) => one.rounds.some((r) => r.contemplate_router.length || r.future_router.length || r.future));
    parts.future.hidden = !lane;
    if (!lane) return;
    const record = recordOf(lane);
    const before = lane.rounds[current(lane) - 1];
    parts.future.className = `cfx-future cfx-m-${lane.method}${view.hidden.has("future") ? " cfx-hidden" : ""}`;
    parts.future.replaceChildren(
      el("header", { class: "cfx-panel-head" }, sign(lane.method), el("h3", { text: say("future.title") }), el("span", { class: "cfx-origin" })),
      el("div", { class: "cfx-future-row" },
        router("contemplate", record && record.contemplate_router, before && before.contemplate_router),
        router("future", record && record.future_router, before && before.future_router),
        readings(lane, record)));
    parts.future.querySelector(".cfx-origin").replaceWith(sentence("span", { class: "cfx-origin" }, record ? confuStory.steering(speech, lane, record) : []));
  }

  function router(name, weights, before) {
    const box = el("div", { class: "cfx-router", "data-router": name }, el("h4", { text: say(`router.${name}`) }));
    if (!weights || !weights.length) {
      box.append(el("p", { class: "cfx-quiet", text: say(`router.none_${name}`) }));
      return box;
    }
    const rows = weights.map((weight, expert) => {
      const change = before && before.length === weights.length ? weight - before[expert] : 0;
      const mark = Math.abs(change) < 0.005 ? "" : change > 0 ? "▲" : "▼";
      return el("li", { class: weight > 0 ? "cfx-on" : "" },
        el("span", { class: "cfx-expert", text: `E${expert + 1}` }),
        el("span", { class: "cfx-meter" }, el("span", { style: `width:${(100 * weight).toFixed(1)}%` })),
        el("span", { class: "cfx-weight", text: weight > 0 ? weight.toFixed(2) : "–" }),
        el("span", { class: "cfx-change", text: mark, title: mark ? say("router.change", { change: (change > 0 ? "+" : "") + change.toFixed(2) }) : null }));
    });
    box.append(el("ol", { class: "cfx-experts" }, ...rows));
    return box;
  }

  function readings(lane, record) {
    const box = el("div", { class: "cfx-readings" }, el("h4", { text: say("readings.title") }), el("p", { class: "cfx-quiet", text: say("readings.note") }));
    const future = record && record.future;
    if (!future || !future.readings.length) {
      box.append(el("p", { class: "cfx-quiet", text: say("readings.none") }));
      return box;
    }
    const following = layout.tokensOf(lane.rounds.slice(record.index));
    box.append(el("ul", {}, ...future.readings.map((reading) => {
      const when = layout.cameTrue(reading.text, following);
      return el("li", { class: when ? "cfx-true" : "" }, token(reading.text, 20),
        el("span", { class: "cfx-weight", text: layout.percent(reading.prob) }),
        el("span", { class: "cfx-came", text: when ? `✓ ${say("readings.came", { n: when })}` : "" }));
    })));
    return box;
  }

  function drawPlain() {
    const lane = treeLanes().length && run.lanes.find((one) => !isTree(one));
    parts.plain.hidden = !lane;
    if (!lane) return;
    if (!parts.plain.children.length) {
      const box = el("div", { class: "cfx-chips", role: "list" });
      box.addEventListener("click", (event) => chipClick(laneOf("plain"), event));
      parts.plain.append(el("summary"), box);
      parts.plain.addEventListener("toggle", invalidate);
    }
    const record = recordOf(lane);
    parts.plain.firstChild.replaceChildren(sign("plain"), el("b", { text: say("method.plain") }), " ", say("plain.summary", { n: record ? record.index : 0 }));
    if (parts.plain.open && record) drawChips(lane, parts.plain.lastChild, record.index, 4);
  }

  function drawCard() {
    const chosen = view.selected;
    const lane = chosen && laneOf(chosen.lane);
    const record = lane && lane.rounds[chosen.round];
    parts.card.setAttribute("aria-label", say("card.label"));
    if (!record || (record.tree.token_ids.length < 2 && chosen.node !== "bonus")) {
      parts.card.className = "cfx-card cfx-card-empty";
      parts.card.replaceChildren(el("p", { text: say("card.empty") }));
      return;
    }
    const phase = phaseOf(record);
    const tree = record.tree;
    const node = chosen.node;
    const own = node === "bonus";
    const state = own ? "target" : confuTree.shownState(record, node, phase);
    const text = own ? confuStory.bonusOf(record).text : tree.texts[node];
    const fact = (key, value) => el("div", { class: "cfx-fact" }, el("dt", { text: say(key) }), el("dd", { text: value }));
    const facts = [fact("card.id", own ? confuStory.bonusOf(record).id : tree.token_ids[node])];
    if (!own && node > 0) {
      const { rank, of } = layout.rankOf(tree, node);
      facts.push(fact("card.rank", say("card.rank_of", { rank, of })), fact("card.draft", layout.percent(tree.draft_probs[node])),
        fact("card.score", tree.scores[node].toFixed(2)));
      if (phase >= 2) facts.push(fact("card.target", layout.percent(tree.target_probs[node])));
    } else if (own) facts.push(fact("card.target", confuTree.bonusShare(record) || "–"), fact("card.margin", confuStory.bonusOf(record).margin.toFixed(2)));
    if (phase >= 3 && !own && tree.choice_texts.length) {
      const at = node === 0 ? 0 : tree.parents[node];
      const wanted = el("dd", {}, token(tree.choice_texts[at], 20), ` ${layout.percent(tree.choice_probs[at])}`);
      facts.push(el("div", { class: "cfx-fact" }, el("dt", { text: say(node === 0 ? "card.wanted_next" : "card.wanted") }), wanted));
    }
    const why = own ? confuStory.bonus(speech, record) : phase < 3 ? speech.parts("card.undecided", {}) : confuStory.node(speech, record, node);
    parts.card.className = `cfx-card cfx-is-${state.replace(" ", "-")}`;
    parts.card.replaceChildren(
      el("div", { class: "cfx-card-token" }, el("span", { class: "cfx-state", text: say(`state.${state.replace(" ", "_")}`) }), token(text, 220)),
      el("dl", {}, ...facts), sentence("p", { class: "cfx-card-why" }, why),
      el("span", { class: "cfx-pin", text: say(view.pinned ? "card.pinned" : "card.pin") }));
  }

  function drawLegend() {
    const entry = (kind, key) => el("li", { class: `cfx-key cfx-is-${kind}` }, el("span", { class: "cfx-swatch" }), say(key));
    parts.legend.replaceChildren(
      el("ul", {}, entry("root", "legend.root"), entry("accepted", "legend.accepted"), entry("target", "legend.target"),
        entry("rejected", "legend.rejected"), entry("not-reached", "legend.not_reached"), entry("pending", "legend.pending")),
      el("p", { text: say("legend.numbers") }));
  }

  // ---- Pointer and keys ----------------------------------------------------------------------

  function nodeAt(event) {
    const group = event.target.closest && event.target.closest("[data-node]");
    if (!group) return null;
    const name = group.dataset.node;
    return { name: name === "bonus" || name === "fold" ? name : Number(name), at: Number(group.dataset.at) };
  }

  function unfold(lane, node) {
    const key = `${lane.name}/${current(lane)}`;
    view.open[key] = new Set([...(view.open[key] || []), node]);
    invalidate();
  }

  function nodeClick(lane, event) {
    const hit = nodeAt(event);
    if (!hit) return;
    if (hit.name === "fold") unfold(lane, hit.at);
    else if (view.predict.on && phaseOf(recordOf(lane)) < 3 && hit.name !== "bonus") guessPath(lane, hit.name);
    else select({ lane: lane.name, round: current(lane), node: hit.name }, true);
  }

  // Repainting slides elements under a resting pointer, and the browser calls that "over" too.
  const resting = { x: -1, y: -1 };
  function hasMoved(event) {
    if (event.type !== "pointerover") return true;
    const moved = event.clientX !== resting.x || event.clientY !== resting.y;
    Object.assign(resting, { x: event.clientX, y: event.clientY });
    return moved;
  }

  function nodeHover(lane, event) {
    const hit = nodeAt(event);
    if (!hit || !hasMoved(event) || view.pinned || hit.name === "fold") return;
    const chosen = view.selected;
    if (chosen && chosen.lane === lane.name && chosen.node === hit.name && chosen.round === current(lane)) return;
    select({ lane: lane.name, round: current(lane), node: hit.name }, false);
  }

  function unhover() {
    if (!view.pinned && view.selected) clearSelection();
  }

  function chipNode(lane, chip) {
    const record = lane.rounds[Number(chip.dataset.round)];
    const step = Number(chip.dataset.step);
    return step < record.path.length ? record.path[step] : "bonus";
  }

  function chipClick(lane, event) {
    const chip = event.target.closest(".cfx-chip");
    if (chip) jumpTo(lane, Number(chip.dataset.round), chipNode(lane, chip));
  }

  function chipHover(lane, event) {
    const chip = event.target.closest(".cfx-chip");
    if (!chip || !hasMoved(event) || view.pinned) return;
    const round = Number(chip.dataset.round);
    const node = chipNode(lane, chip);
    const chosen = view.selected;
    if (chosen && chosen.lane === lane.name && chosen.round === round && chosen.node === node) return;
    select({ lane: lane.name, round, node }, false);
  }

  function treeFocus(lane) {
    const record = recordOf(lane);
    if (!record || !record.tree.token_ids.length || view.table) return;
    const chosen = view.selected;
    if (!chosen || chosen.lane !== lane.name || chosen.round !== record.index) {
      select({ lane: lane.name, round: record.index, node: 0 }, false);
    }
  }

  /** Arrow keys inside a tree: to the parent, the first child, the siblings. */
  function treeKey(lane, event) {
    const record = recordOf(lane);
    const chosen = view.selected;
    if (event.key === "Escape") {
      clearSelection();
      controls.slider.focus();
      event.preventDefault();
      return;
    }
    if (!record || view.table || !chosen || chosen.lane !== lane.name || chosen.round !== record.index) return;
    const tree = record.tree;
    const children = layout.childrenOf(tree);
    const last = confuStory.lastOf(record);
    const own = confuStory.bonusOf(record) && phaseOf(record) >= 3;
    const family = (node) => (node === last && own ? ["bonus", ...children[node]] : children[node]);
    const at = chosen.node;
    const parent = at === "bonus" ? last : tree.parents[at];
    const siblings = parent < 0 ? [at] : family(parent);
    const shift = (by) => siblings[siblings.indexOf(at) + by];
    const moves = {
      ArrowLeft: () => (parent >= 0 ? parent : undefined),
      ArrowRight: () => (at === "bonus" ? undefined : family(at)[0]),
      ArrowUp: () => shift(-1),
      ArrowDown: () => shift(1),
    };
    if (moves[event.key]) {
      const next = moves[event.key]();
      if (next !== undefined) select({ lane: lane.name, round: record.index, node: next }, view.pinned);
      event.preventDefault();
      event.stopPropagation();
    } else if (event.key === "Enter") {
      if (view.predict.on && phaseOf(record) < 3 && at !== "bonus") guessPath(lane, at);
      else select(chosen, !view.pinned);
      event.preventDefault();
    }
  }

  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || parts.dialog.open) return;
    const typing = event.target.matches("select, input:not([type=range]), textarea");
    if (typing) return;
    const onRange = event.target.matches("input[type=range]") && event.target !== controls.slider;
    const onButton = event.target.matches("button, summary");
    const actions = {
      ArrowLeft: () => goTo((view.follow ? limit() : view.position) - 1),
      ArrowRight: () => goTo((view.follow ? limit() : view.position) + 1),
      Home: () => goTo(0),
      End: () => goTo(limit()),
      " ": togglePlay,
      a: () => focusTree(0),
      b: () => focusTree(1),
      t: () => toggleTable(),
      "?": () => openDialog("help"),
      Escape: clearSelection,
    };
    if (onRange && event.key.startsWith("Arrow")) return;
    if (onButton && event.key === " ") return;
    const action = actions[event.key];
    if (!action) return;
    action();
    event.preventDefault();
  }

  function focusTree(index) {
    const lane = panelLanes()[index];
    if (!lane) return;
    view.tab = lane.name;
    if (view.solo) view.solo = lane.name;
    draw();
    panels[lane.name].tree.focus();
  }

  function toggleTable() {
    view.table = !view.table;
    invalidate();
  }

  function toggleExpanded(name) {
    if (!view.expanded.delete(name)) view.expanded.add(name);
    invalidate();
  }

  /** What a screen reader hears after the user's own move; streamed rounds stay silent. */
  function announce() {
    if (!run) return;
    draw();
    const told = panelLanes()
      .map((lane) => recordOf(lane))
      .map((record, i) => record && confuStory.round(speech, panelLanes()[i], record, run.header.prompt_tokens))
      .filter(Boolean)
      .map((list) => list.map((part) => (typeof part === "string" ? part : layout.visible(part.token, 24))).join(""));
    parts.spoken.textContent = `${controls.count.textContent}. ${told.join(" ")}`;
  }

  // ---- Predict, then reveal ------------------------------------------------------------------

  function togglePredict() {
    view.predict.on = !view.predict.on;
    Object.assign(view.predict, { guess: {}, right: 0, asked: 0, counted: new Set() });
    stopPlaying();
    if (run && view.predict.on) {
      if (view.follow || view.position === 0 || view.position >= limit()) view.position = Math.min(1, limit());
      view.follow = false;
    }
    view.phase = view.predict.on ? 1 : 4;
    invalidate();
  }

  /** The learner clicks the node where they expect the target to stop agreeing; then it is shown. */
  function guessPath(lane, node) {
    const record = recordOf(lane);
    view.predict.guess[lane.name] = node;
    const key = `${lane.name}/${record.index}`;
    if (!view.predict.counted.has(key)) {
      view.predict.counted.add(key);
      view.predict.asked += 1;
      if (node === confuStory.lastOf(record)) view.predict.right += 1;
    }
    view.phase = 4;
    select({ lane: lane.name, round: record.index, node }, true);
  }

  function predictHint() {
    const { guess, right, asked } = view.predict;
    const name = Object.keys(guess)[0];
    const score = say("predict.score", { right, asked });
    if (name === undefined || view.phase < 3) return `${say("predict.ask")} ${asked ? score : ""}`;
    const record = recordOf(laneOf(name));
    const wanted = layout.lineage(record.tree, guess[name]).slice(1);
    let agreed = 0;
    while (agreed < wanted.length && wanted[agreed] === record.path[agreed]) agreed += 1;
    const key = guess[name] === confuStory.lastOf(record) ? "predict.right" : "predict.wrong";
    return `${say(key, { guessed: wanted.length, agreed, accepted: record.path.length })} ${score}`;
  }

  // ---- Files, links, dialogs -----------------------------------------------------------------

  function withTree(action) {
    const lane = panelLanes().find((one) => !panels[one.name].box.hidden && panels[one.name].tree.querySelector("svg.cfx-tree"));
    if (lane) action(panels[lane.name].tree.querySelector("svg.cfx-tree"), `${lane.name}-round-${current(lane)}`);
    else notify(say("export.no_tree"));
  }

  const MOST_BYTES = 8e6;

  async function openFile(file) {
    if (!file || !host.openFile) return;
    if (file.size > MOST_BYTES) notify(say("export.too_big"));
    else host.openFile(await file.text());
  }

  function linkTo(prompt) {
    const step = view.follow ? limit() : view.position;
    return host.share({ header: run && run.header, source: run && run.source, step, language: speech.language, prompt });
  }

  /** Copy a link to this view. A visitor's own prompt goes into it only if they say so. */
  async function copyLink() {
    if (run && run.source.kind !== "recorded") openDialog("link");
    else await copyText(linkTo(false), controls.link, "action.link");
  }

  async function copyText(text, from, key) {
    try {
      await navigator.clipboard.writeText(text);
      from.textContent = say("action.copied");
      setTimeout(() => { from.textContent = say(key); }, 1600);
    } catch {
      if (!parts.dialog.open) openDialog("link"); // the clipboard was refused: copy by hand
    }
  }

  function linkBody() {
    const share = el("input", { type: "checkbox", onchange: () => { field.value = linkTo(share.checked); } });
    const field = el("input", { class: "cfx-link-field", readonly: true, value: linkTo(false), "aria-label": say("action.link") });
    const copy = el("button", { type: "button", class: "cfx-button cfx-primary", text: say("action.copy"), onclick: () => { field.select(); copyText(field.value, copy, "action.copy"); } });
    return el("div", {}, field, el("p", {}, el("label", {}, share, " ", say("link.with_prompt"))), copy);
  }

  function openDialog(kind) {
    const close = button("close", "action.close", () => parts.dialog.close());
    close.textContent = say("action.close");
    const body = { help: helpBody, glossary: glossaryBody, link: linkBody }[kind]();
    parts.dialog.replaceChildren(el("h2", { text: say(`dialog.${kind}`) }), body, close);
    parts.dialog.setAttribute("aria-label", say(`dialog.${kind}`));
    parts.dialog.showModal();
  }

  function helpBody() {
    const rows = ["← →", "Home End", "Space", "a b", "↑ ↓ ← →", "Enter", "Esc", "t", "?"];
    return el("table", { class: "cfx-table" }, el("tbody", {}, ...rows.map((combination, i) =>
      el("tr", {}, el("td", {}, el("kbd", { text: combination })), el("td", { text: say(`help.${i}`) })))));
  }

  function glossaryBody() {
    const words = assets.glossary;
    return el("dl", { class: "cfx-glossary" }, ...words.flatMap((word) => [
      el("dt", { text: say(`glossary.${word}`) }), el("dd", { text: say(`glossary.${word}_means`) })]));
  }

  function tourStage() {
    return {
      root, say, cards: assets.tour,
      spot: (selector) => { view.spot = selector; draw(); },
      show: (round, phase) => {
        if (!run) return;
        view.align = controls.align.value = "round";
        stopPlaying();
        moveTo(round === "best" ? bestRound() : round, phase);
      },
    };
  }

  // ---- Start ---------------------------------------------------------------------------------

  element.replaceChildren(style, root);
  buildTransport();
  buildActions();
  translate();
  root.addEventListener("keydown", keys);
  root.addEventListener("dragover", (event) => { if (host.openFile) event.preventDefault(); });
  root.addEventListener("drop", (event) => {
    if (!host.openFile || !event.dataTransfer.files.length) return;
    event.preventDefault();
    openFile(event.dataTransfer.files[0]);
  });
  document.addEventListener("click", (event) => {
    if (controls.menu.open && !controls.menu.contains(event.target)) controls.menu.open = false;
  });
  let width = 0;
  new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    invalidate();
  }).observe(root);
  draw();
  return { receive };
}
