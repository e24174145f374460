// The step player: its skeleton, its controls, its clock, and who paints what.

function confuPlayer(element, assets, host) {
  const { el, icon, sign, ask, memory } = confuDom;
  const layout = confuLayout;
  const { LANDING } = confuState;
  const PHASES = ["draft", "check", "accept", "append"];
  const PHASE_TIME = [1100, 800, 1000, 700]; // milliseconds at speed 1
  const STILL_TIME = 1800; // per round where the reader wants no motion
  const NARROW = 800;
  const MOST_BYTES = 8e6;

  const state = confuState.create();
  const { view } = state;
  let speech = confuStory.speaker("en", assets.strings.en, assets.strings.en);
  let clock = { timer: null, playing: false, animate: false, speed: 1 };
  let frame = 0;
  let turn = 0; // whose picture a streaming frame paints first
  let spot = null; // what the tour points at, as a selector
  let panels = {};
  let width = 0; // of the player, kept so that painting need not measure
  const changed = memory();

  const parts = {
    badge: el("span", { class: "cfx-badge" }),
    title: el("span", { class: "cfx-title" }),
    actions: el("div", { class: "cfx-actions" }),
    notice: el("div", { class: "cfx-notice", role: "alert", hidden: true }),
    empty: el("p", { class: "cfx-empty" }),
    race: el("div", { class: "cfx-race" }),
    verdict: el("div", { class: "cfx-verdict" }),
    meta: el("p", { class: "cfx-meta" }),
    transport: el("div", { class: "cfx-transport", role: "group" }),
    phases: el("div", { class: "cfx-phases" }),
    panels: el("div", { class: "cfx-panels" }),
    future: el("section", { class: "cfx-future" }),
    plain: el("details", { class: "cfx-plain" }),
    card: el("section", { class: "cfx-card" }),
    legend: el("div", { class: "cfx-legend" }),
  };
  const spoken = el("div", { class: "cfx-spoken", "aria-live": "polite" });
  const dialog = el("dialog", { class: "cfx-dialog" });
  const { badge, title, actions, notice, empty, race: bars, verdict, meta, ...below } = parts;
  const root = el("section", { class: "cfx", tabindex: "-1" },
    el("header", { class: "cfx-top" }, badge, title, actions), notice, empty,
    el("div", { class: "cfx-stage" }, bars, el("div", { class: "cfx-result" }, verdict, meta), ...Object.values(below)),
    spoken, dialog);
  const controls = {};

  /** What the painters see of the player. */
  const stage = {
    state,
    get speech() { return speech; },
    say: (key, parameters) => speech.say(key, parameters),
    look: (lane) => (lane.intervention ? "changed" : lane.method),
    name: nameOf,
    ask: (word) => ask(say(`glossary.${word}`), say(`glossary.${word}_means`)),
    invalidate, later, select, point, unpoint, hasMoved, jumpTo, leaveTree, linkTo, copy,
  };
  const { say } = stage;
  const race = confuRace.create(stage, parts.race, parts.verdict);
  const future = confuFuture.create(stage, parts.future, assets.maps);
  const charts = confuCharts.create(stage, host.charts);
  const card = confuCard.create(stage, parts.card, parts.legend);
  const dialogs = confuDialogs.create(stage, dialog, assets.glossary);

  function nameOf(lane) {
    const method = say(`method.${lane.method}`);
    if (!lane.intervention) return method;
    const { change, expert } = lane.intervention;
    const what = say(`change.${change.replaceAll(" ", "_")}`, { expert: `E${(expert ?? 0) + 1}` });
    return say("method.changed", { method, what });
  }

  // ---- Controls ------------------------------------------------------------------------------

  function button(name, key, action, content) {
    const node = el("button", { type: "button", class: `cfx-button cfx-${name}`, onclick: action }, content);
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
    const speeds = [0.5, 1, 2, 4].map((value) => el("option", { value, text: `${value}×`, selected: value === 1 }));
    controls.speed = el("select", { class: "cfx-select", onchange: () => { clock.speed = Number(controls.speed.value); } }, ...speeds);
    controls.live = button("live", "transport.live", followLive);
    controls.align = el("select", { class: "cfx-select", onchange: () => { state.setAlign(controls.align.value); invalidate(); } });
    const field = (key, control) => el("label", { class: "cfx-field" }, el("span", { "data-key": key }), control);
    parts.transport.replaceChildren(
      el("div", { class: "cfx-keys" },
        step("first", () => goTo(0)), step("back", () => goTo(state.place() - 1)), controls.play,
        step("forward", () => goTo(state.place() + 1)), step("last", () => goTo(state.limit()))),
      controls.slider, controls.count, controls.live,
      field("transport.speed", controls.speed), field("transport.align", controls.align));
  }

  function buildPhases() {
    controls.phases = PHASES.map((_, i) => el("button", { type: "button", class: "cfx-phase", onclick: () => showPhase(i + 1) }));
    controls.hint = el("p", { class: "cfx-hint" });
    parts.phases.replaceChildren(el("div", { class: "cfx-phase-row", role: "group" }, ...controls.phases), controls.hint);
  }

  function buildActions() {
    const entry = (key, action) => button("entry", key, () => { controls.menu.open = false; action(); });
    controls.predict = button("predict", "predict.toggle", () => { stopPlaying(); state.togglePredict(); invalidate(); });
    controls.table = button("tables", "action.table", toggleTable);
    controls.link = host.share && button("link", "action.link", copyLink);
    controls.file = el("input", {
      type: "file", accept: ".json,application/json", hidden: true, tabindex: "-1",
      onchange: () => { openFile(controls.file.files[0]); controls.file.value = ""; },
    });
    controls.menu = el("details", { class: "cfx-menu" },
      el("summary", { class: "cfx-button", "data-key": "action.export" }),
      el("div", { class: "cfx-menu-list" },
        entry("export.trace", () => confuExport.trace(state.run)),
        entry("export.page", () => confuExport.page(state.run, assets, speech, host.source)),
        entry("export.svg", () => withTree(confuExport.picture)),
        entry("export.png", () => withTree(confuExport.bitmap)),
        host.openFile && entry("export.open", () => controls.file.click())));
    const buttons = [
      button("tour", "action.tour", () => confuTour.start(tourStage())), controls.predict, controls.table, controls.link,
      controls.menu, button("words", "action.glossary", () => dialogs.open("glossary")),
      button("help", "action.help", () => dialogs.open("help")), controls.file,
    ];
    parts.actions.replaceChildren(...buttons.filter(Boolean));
  }

  function buildPlain() {
    parts.plain.append(el("summary"));
    parts.plain.addEventListener("toggle", invalidate);
  }

  /** Put every sentence of the fixed parts in the current language. */
  function translate() {
    root.setAttribute("lang", speech.language);
    root.setAttribute("aria-label", say("player.label"));
    for (const node of root.querySelectorAll("[data-key]")) {
      const words = say(node.dataset.key);
      if (node.querySelector("svg")) label(node, words);
      else node.textContent = words;
    }
    parts.transport.setAttribute("aria-label", say("transport.label"));
    controls.slider.setAttribute("aria-label", say("transport.slider"));
    controls.align.replaceChildren(...["round", "text", "time"].map((value) =>
      el("option", { value, text: say(`align.${value}`), selected: value === view.align })));
    empty.textContent = say("player.empty");
    card.drawLegend();
    invalidate();
  }

  function label(node, words) {
    node.setAttribute("aria-label", words);
    node.title = words;
  }

  // ---- Messages ------------------------------------------------------------------------------

  function receive(text) {
    let message;
    try { message = JSON.parse(text); } catch { return; }
    if (!message || typeof message !== "object") return;
    if (message.language) setLanguage(message.language);
    const before = state.run && state.run.id;
    if (state.receive(message)) {
      if (before !== message.run) stopPlaying();
      notify("");
      panels = {};
    }
    if (message.kind === "error") notify(message.message);
    if (state.beyond !== null) {
      notify(say("link.beyond", { step: state.beyond, end: state.limit() }));
      state.beyond = null;
    }
    invalidate();
  }

  function notify(text) {
    notice.textContent = text || "";
    notice.hidden = !text;
  }

  function setLanguage(language) {
    if (!assets.strings[language] || language === speech.language) return;
    speech = confuStory.speaker(language, assets.strings[language], assets.strings.en);
    translate();
  }

  // ---- Moving and playing --------------------------------------------------------------------

  function goTo(position) {
    if (!state.run) return;
    stopPlaying();
    state.moveTo(position, view.predict.on ? 1 : LANDING);
    announce();
  }

  function jumpTo(lane, index, node) {
    stopPlaying();
    // A round of plain decoding has no place on the slider of rounds: go by the text.
    if (!state.isTree(lane) && state.treeLanes().length && view.align !== "text") state.setAlign("text");
    view.pinned = false;
    state.moveTo(view.align === "text" ? layout.starts(lane.rounds)[index] : index, LANDING);
    if (node !== undefined) select({ lane: lane.name, round: index, node }, true);
    announce();
  }

  function followLive() {
    stopPlaying();
    state.hold();
    view.follow = state.run && state.run.state === "running";
    view.phase = LANDING;
    invalidate();
  }

  function showPhase(phase) {
    stopPlaying();
    state.hold();
    view.phase = phase;
    invalidate();
  }

  const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

  function togglePlay() {
    if (clock.playing) stopPlaying();
    else if (state.run && state.limit() > 0) {
      state.hold();
      if (view.position >= state.limit() && view.phase === 4) view.position = 0;
      clock.playing = true;
      clock.animate = !still();
      view.phase = still() ? 4 : 1;
      tick();
    }
    invalidate();
  }

  function tick() {
    clearTimeout(clock.timer);
    clock.timer = setTimeout(playOn, (still() ? STILL_TIME : PHASE_TIME[view.phase - 1]) / clock.speed);
  }

  function playOn() {
    if (view.phase < 4) view.phase += 1;
    else if (view.position < state.limit()) {
      view.position += 1;
      view.phase = still() ? 4 : 1;
      if (!view.pinned) view.selected = null;
    } else if (state.run.state !== "running") stopPlaying();
    if (clock.playing) tick();
    invalidate();
  }

  function stopPlaying() {
    clearTimeout(clock.timer);
    Object.assign(clock, { playing: false, animate: false });
  }

  // ---- Selecting -----------------------------------------------------------------------------

  function select(selection, pin) {
    view.selected = selection;
    view.pinned = Boolean(selection && pin);
    invalidate();
  }

  /** A selection under the pointer: it gives way to a pinned one. */
  function point(selection) {
    const chosen = view.selected;
    const same = chosen && chosen.lane === selection.lane && chosen.round === selection.round && chosen.node === selection.node;
    if (!view.pinned && !same) select(selection, false);
  }

  function unpoint() {
    if (!view.pinned && view.selected) select(null, false);
  }

  // Repainting slides elements under a resting pointer, and the browser calls that "over" too.
  const resting = { x: -1, y: -1 };
  function hasMoved(event) {
    const moved = event.clientX !== resting.x || event.clientY !== resting.y;
    Object.assign(resting, { x: event.clientX, y: event.clientY });
    return moved;
  }

  function leaveTree() {
    select(null, false);
    controls.slider.focus();
  }

  function focusTree(index) {
    const lane = state.panelLanes()[index];
    if (!lane) return;
    state.showLane(lane.name);
    draw();
    panels[lane.name].canvas.focus();
  }

  function toggleTable() {
    view.table = !view.table;
    invalidate();
  }

  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    const { target } = event;
    if (target.matches("select, input:not([type=range])")) return;
    // Another slider keeps its arrows, a button its space.
    if (target.matches("input[type=range]") && target !== controls.slider && /^(Arrow|Home|End)/.test(event.key)) return;
    if (target.matches("button, summary") && event.key === " ") return;
    const actions = {
      ArrowLeft: () => goTo(state.place() - 1),
      ArrowRight: () => goTo(state.place() + 1),
      Home: () => goTo(0),
      End: () => goTo(state.limit()),
      " ": togglePlay,
      a: () => focusTree(0),
      b: () => focusTree(1),
      t: toggleTable,
      "?": () => dialogs.open("help"),
      Escape: () => {
        for (const open of root.querySelectorAll(".cfx-ask[open]")) open.open = false;
        select(null, false);
      },
    };
    if (!actions[event.key]) return;
    actions[event.key]();
    event.preventDefault();
  }

  /** What a screen reader hears after the reader's own move; streamed rounds stay silent. */
  function announce() {
    draw();
    const told = state.panelLanes().map((lane) => {
      const record = state.recordOf(lane);
      const sentence = record ? confuStory.round(speech, lane, record, state.run.header.prompt_tokens) : [];
      return sentence.map((part) => (typeof part === "string" ? part : layout.visible(part.token, 24))).join("");
    });
    spoken.textContent = `${controls.count.textContent}. ${told.join(" ")}`;
  }

  // ---- Painting ------------------------------------------------------------------------------

  function invalidate() {
    if (!frame) frame = requestAnimationFrame(draw);
  }

  /** What must measure the page waits until all is written, so that the page is laid out once. */
  let measures = [];
  function later(measure) {
    measures.push(measure);
  }

  function draw() {
    cancelAnimationFrame(frame);
    frame = 0;
    const { run } = state;
    root.classList.toggle("cfx-none", !run);
    root.classList.toggle("cfx-playing", clock.animate);
    root.classList.toggle("cfx-narrow", width < NARROW);
    for (const [name, node] of Object.entries(parts)) node.classList.toggle("cfx-hidden", view.hidden.has(name));
    empty.hidden = Boolean(run);
    controls.table.setAttribute("aria-pressed", String(view.table));
    controls.predict.setAttribute("aria-pressed", String(view.predict.on));
    if (!run) return;
    drawTop();
    race.draw();
    drawTransport();
    drawPhases();
    drawPictures(arrangePanels());
    drawPlain();
    card.draw();
    charts.draw();
    if (changed("spot", spot) || spot) drawSpot();
    confuTour.update();
    for (const measure of measures.splice(0)) measure();
  }

  function drawSpot() {
    for (const node of root.querySelectorAll(".cfx-spot")) node.classList.remove("cfx-spot");
    const pointed = spot && root.querySelector(spot);
    if (pointed) pointed.classList.add("cfx-spot");
  }

  function drawTop() {
    const { source, header } = state.run;
    if (!changed("top", state.run.id, state.run.state, speech.language)) return;
    const live = source.kind === "live";
    const kind = live ? state.run.state : source.kind;
    badge.className = `cfx-badge cfx-badge-${kind}`;
    badge.textContent = say(`badge.${kind}`);
    title.replaceChildren(el("q", { text: layout.visible(header.prompt, 160).replaceAll("␣", " ") }));
    const { name: model, device, dtype } = header.target;
    const { temperature, seed, nodes, depth, top_k } = header.settings;
    const date = header.created.slice(0, 10);
    const size = nodes === "auto" ? say("meta.nodes_auto") : say("meta.nodes", { n: nodes });
    const sparse = header.settings.contemplate < 1 ? say("meta.contemplate", { share: layout.percent(header.settings.contemplate) }) : "";
    meta.textContent = say(live ? "meta.live" : "meta.recorded", { model, device, dtype, temperature, seed, size, depth, top_k, date }) + sparse;
  }

  function drawTransport() {
    const end = state.limit();
    const at = state.place();
    const text = view.align === "text";
    controls.slider.max = end;
    controls.slider.value = at;
    controls.align.value = view.align;
    const gains = state.panelLanes().map((lane) => {
      const record = state.recordOf(lane);
      return say("transport.gain", { method: stage.name(lane), n: record ? record.tokens.length : 0 });
    });
    const place = say(text ? "transport.at_token" : "transport.at_round", { at: text ? at + 1 : at, end: text ? end + 1 : end });
    if (controls.count.textContent !== place) controls.count.textContent = place;
    controls.slider.setAttribute("aria-valuetext", `${place}: ${gains.join(", ")}`);
    if (changed("play", clock.playing, speech.language)) {
      controls.play.replaceChildren(icon(clock.playing ? "pause" : "play"));
      label(controls.play, say(clock.playing ? "transport.pause" : "transport.play"));
    }
    controls.live.hidden = state.run.state !== "running";
    controls.live.setAttribute("aria-pressed", String(view.follow));
  }

  function drawPhases() {
    const usable = state.panelLanes().some((lane) => {
      const record = state.recordOf(lane);
      return record && record.tree.token_ids.length > 1;
    });
    const { on, guess, right, asked } = view.predict;
    if (!changed("phases", state.run.id, usable, view.phase, speech.language, on, guess, right, asked)) return;
    parts.phases.classList.toggle("cfx-muted", !usable);
    parts.phases.firstChild.setAttribute("aria-label", say("phase.label"));
    controls.phases.forEach((node, i) => {
      node.replaceChildren(el("span", { class: "cfx-number", text: i + 1 }), say(`phase.${PHASES[i]}`));
      node.setAttribute("aria-pressed", String(view.phase === i + 1));
    });
    const hint = usable ? `phase.hint_${PHASES[view.phase - 1]}` : "phase.hint_prefill";
    controls.hint.textContent = view.predict.on && usable ? predictHint() : say(hint);
  }

  function predictHint() {
    const { guess, right, asked } = view.predict;
    const lane = state.laneOf(Object.keys(guess)[0]);
    const score = asked ? say("predict.score", { right, asked }) : "";
    if (!lane || view.phase < 3) return `${say("predict.ask")} ${score}`;
    const record = state.recordOf(lane);
    const wanted = layout.lineage(record.tree, guess[lane.name]).slice(1);
    let agreed = 0;
    while (agreed < wanted.length && wanted[agreed] === record.path[agreed]) agreed += 1;
    const key = guess[lane.name] === confuStory.lastOf(record) ? "predict.right" : "predict.wrong";
    return `${say(key, { guessed: wanted.length, agreed, accepted: record.path.length })} ${score}`;
  }

  /** Make the panels of a new run, show those that are asked for, and give them. */
  function arrangePanels() {
    const lanes = state.panelLanes();
    if (Object.keys(panels).length !== lanes.length) {
      panels = Object.fromEntries(lanes.map((lane) => [lane.name, confuPanel.create(stage, lane)]));
      parts.panels.replaceChildren(tabs(lanes), ...lanes.map((lane) => panels[lane.name].box));
    }
    const narrow = width < NARROW;
    const last = lanes.length ? lanes[lanes.length - 1].name : null;
    const known = lanes.some((lane) => lane.name === view.tab);
    const alone = lanes.length === 1 ? last : view.solo || (narrow ? (known ? view.tab : last) : null);
    const shown = alone ? [alone] : view.shown;
    parts.panels.classList.toggle("cfx-one", shown.length === 1);
    parts.panels.classList.toggle("cfx-many", lanes.length > 2);
    for (const node of parts.panels.querySelectorAll(".cfx-tab")) {
      node.setAttribute("aria-pressed", String(shown.includes(node.dataset.lane)));
    }
    for (const lane of lanes) panels[lane.name].box.hidden = !shown.includes(lane.name);
    return shown.map((name) => panels[name]);
  }

  /** Trees and the future token. While a run streams, one picture a frame and each in its turn, so
   * that no frame holds up the page. */
  function drawPictures(onShow) {
    const narrow = width < NARROW;
    const pictures = [...onShow.map((panel) => () => panel.draw(narrow)), future.draw];
    const streaming = state.run.state === "running" && view.follow;
    for (let i = 0; i < pictures.length; i++) {
      const at = (turn + i) % pictures.length;
      if (!pictures[at]() || !streaming) continue;
      turn = at + 1;
      invalidate();
      return;
    }
  }

  function tabs(lanes) {
    return el("div", { class: "cfx-switch", role: "group", "aria-label": say("panel.switch") },
      ...lanes.map((lane) => el("button", {
        type: "button", class: "cfx-tab", "data-lane": lane.name,
        onclick: () => { state.showLane(lane.name); invalidate(); },
      }, sign(stage.look(lane)), stage.name(lane))));
  }

  function drawPlain() {
    const lane = state.treeLanes().length ? state.run.lanes.find((one) => !state.isTree(one)) : null;
    parts.plain.hidden = !lane;
    if (!lane) return;
    if (controls.plainOf !== lane) {
      controls.plainOf = lane;
      controls.plain = confuChips.create(stage, lane);
      parts.plain.replaceChildren(parts.plain.firstChild, controls.plain.box);
    }
    const record = state.recordOf(lane);
    if (changed("plain", state.run.id, speech.language, record && record.index)) {
      parts.plain.firstChild.replaceChildren(sign("plain"), el("b", { text: stage.name(lane) }), ` ${say("plain.summary", { n: record ? record.index : 0 })}`);
    }
    if (parts.plain.open && record) controls.plain.draw(record.index, 4);
  }

  // ---- Files, links, the tour ----------------------------------------------------------------

  function withTree(save) {
    const lane = state.panelLanes().find((one) => !panels[one.name].box.hidden && panels[one.name].canvas.querySelector(".cfx-tree"));
    if (lane) save(panels[lane.name].canvas.querySelector(".cfx-tree"), `${lane.name}-round-${state.current(lane)}`);
    else notify(say("export.no_tree"));
  }

  async function openFile(file) {
    if (!file || !host.openFile) return;
    if (file.size > MOST_BYTES) notify(say("export.too_big"));
    else host.openFile(await file.text());
  }

  function linkTo(prompt) {
    const { run } = state;
    const shown = view.solo ? [view.solo] : view.shown;
    return host.share({
      header: run && run.header, step: state.place(), phase: view.phase === LANDING ? null : view.phase,
      language: speech.language, panels: shown, hidden: [...view.hidden], prompt,
    });
  }

  /** A link to a recorded run is copied at once; for one's own run the dialog asks first. */
  async function copyLink() {
    if (state.run && state.run.source.kind !== "recorded") dialogs.open("link");
    else await copy(linkTo(false), controls.link, "action.link");
  }

  async function copy(text, from, key) {
    try {
      await navigator.clipboard.writeText(text);
      from.textContent = say("action.copied");
      setTimeout(() => { from.textContent = say(key); }, 1600);
    } catch {
      if (!dialog.open) dialogs.open("link"); // the clipboard was refused: copy by hand
    }
  }

  function tourStage() {
    return {
      root, say, state, cards: assets.tour,
      spot: (selector) => { spot = selector; draw(); },
      show: (round, phase) => {
        if (!state.run) return;
        stopPlaying();
        state.setAlign("round");
        state.moveTo(round === "best" ? state.bestRound() : round, phase);
      },
    };
  }

  // ---- Start ---------------------------------------------------------------------------------

  element.replaceChildren(el("style", { text: assets.css }), root);
  buildTransport();
  buildPhases();
  buildActions();
  buildPlain();
  translate();
  root.addEventListener("keydown", keys);
  root.addEventListener("dragover", (event) => { if (host.openFile) event.preventDefault(); });
  root.addEventListener("drop", (event) => {
    if (!host.openFile || !event.dataTransfer.files.length) return;
    event.preventDefault();
    openFile(event.dataTransfer.files[0]);
  });
  // What unfolds over other parts closes at a click elsewhere.
  document.addEventListener("click", (event) => {
    for (const open of root.querySelectorAll(".cfx-menu[open], .cfx-ask[open]")) {
      if (!open.contains(event.target)) open.open = false;
    }
  });
  width = root.clientWidth;
  new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    invalidate();
  }).observe(root);
  draw();
  return { receive };
}
