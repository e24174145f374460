// What the player has received and where its reader stands. No page in here; tests run it in Node.
//
// Messages are {run, seq, kind, ...}: `reset` starts a run, `step` adds one round to one lane, `full`
// replaces everything, `error` and `language` carry what they say. History lives here: moving
// through the rounds asks nobody.

const confuState = ((layout) => {
  // Where a reader who moves through the rounds lands: the last phase, not the one before, in which the
  // path is accepted. The tree looks the same in both; but only now the round's tokens stand in the
  // text, so that a node and its token can mark one another, the gain is told, and a smaller tree can
  // be tried. The three phases before are one click away.
  const LANDING = 4;

  function create() {
    const view = {
      position: 0,
      follow: true, // the newest round, until the reader moves
      align: "round",
      phase: LANDING, // 1 draft, 2 check, 3 accept, 4 append
      selected: null, // {lane, round, node}; node is a number, "bonus", or null for the whole round
      pinned: false,
      shown: [], // names of the lanes on show, at most two
      solo: null,
      expanded: new Set(),
      open: {}, // "lane/round" -> nodes whose folded children are shown
      table: false,
      budget: {}, // lane -> nodes of the smaller tree
      predict: { on: false, guess: {}, right: 0, asked: 0, counted: new Set() },
      hidden: new Set(), // parts that a lesson hides
    };
    // What a link asks for: the round (pending) and the phase (opening) at which the next run that
    // nobody has scrubbed opens; beyond: the round that it asked for, if the run ended before.
    const state = { run: null, view, pending: null, opening: null, beyond: null };

    // ---- Messages ----------------------------------------------------------------------------

    /** Take one message; true if the page must be built anew for another run. */
    state.receive = (message) => {
      if (Array.isArray(message.hide)) view.hidden = new Set(message.hide);
      if (Array.isArray(message.panels)) state.wanted = message.panels;
      if (message.phase) state.opening = message.phase;
      if (message.kind === "reset") begin(message, "running");
      else if (message.kind === "step") return advance(message);
      else if (message.kind === "full") return replace(message);
      else if (message.kind === "language" && message.step !== undefined) {
        state.pending = message.step; // where a link wants the next run to open
        return false;
      } else return false;
      return true;
    };

    function begin(message, progress) {
      const header = message.trace;
      const lanes = Object.entries(header.lanes).map(([name, lane]) => ({ ...lane, name, rounds: lane.rounds.slice() }));
      state.run = { id: message.run, seq: message.seq, broken: false, source: message.source, state: progress, header, lanes };
      Object.assign(view, { position: 0, follow: true, phase: LANDING, selected: null, pinned: false, open: {}, budget: {} });
      Object.assign(view.predict, { guess: {}, right: 0, asked: 0, counted: new Set() });
      const names = state.panelLanes().map((lane) => lane.name);
      const asked = (state.wanted || []).filter((name) => names.includes(name));
      view.shown = (asked.length ? asked : names).slice(-2);
      if (!names.includes(view.solo)) view.solo = null;
    }

    function advance(message) {
      const { run } = state;
      if (!run || message.run !== run.id || run.broken) return false;
      if (message.seq !== run.seq + 1) {
        run.broken = true; // a hole: wait for `full`
        return false;
      }
      run.seq = message.seq;
      const lane = state.laneOf(message.lane);
      if (!lane || lane.rounds.length !== message.record.index) return false;
      lane.rounds.push(message.record);
      lane.text = message.text;
      return false;
    }

    /** The whole run; true if it is another one than that on show. */
    function replace(message) {
      const same = Boolean(state.run) && state.run.id === message.run;
      if (same) {
        // What was streamed stands already: lanes keep their identity, so nothing is built anew.
        const { run } = state;
        Object.assign(run, { seq: message.seq, broken: false, source: message.source, state: message.state, header: message.trace });
        for (const lane of run.lanes) Object.assign(lane, message.trace.lanes[lane.name]);
      } else {
        begin(message, message.state);
        open(message.position ?? state.bestRound());
      }
      if (view.follow && (state.pending !== null || state.opening)) {
        open(state.pending ?? state.bestRound());
        state.pending = null;
      }
      return !same;
    }

    /** Open a finished run at a round, and in the phase that a link asked for. */
    function open(position) {
      view.follow = false;
      view.position = Math.min(position, state.limit());
      view.phase = state.opening || LANDING;
      state.beyond = position > state.limit() ? position : null;
      state.opening = null;
    }

    // ---- Lanes and rounds ----------------------------------------------------------------------

    state.laneOf = (name) => state.run && state.run.lanes.find((lane) => lane.name === name);
    state.isTree = (lane) => lane.method !== "plain";
    state.treeLanes = () => (state.run ? state.run.lanes.filter(state.isTree) : []);
    /** The lanes that have a panel: those with trees, else whatever there is. */
    state.panelLanes = () => (state.treeLanes().length ? state.treeLanes() : state.run ? state.run.lanes : []);
    state.recordOf = (lane) => lane.rounds[state.current(lane)];

    state.limit = () => {
      if (!state.run) return 0;
      if (view.align === "text") return Math.max(0, ...state.run.lanes.map((lane) => layout.tokensOf(lane.rounds).length - 1));
      return Math.max(0, ...state.panelLanes().map((lane) => lane.rounds.length - 1));
    };

    /** The round of a lane that is on show. In order of time a lane stands where its clock stands:
     * at the last round that it had finished when the longest lane finished the shown one. */
    state.current = (lane) => {
      const last = lane.rounds.length - 1;
      if (view.follow) return last;
      if (view.align !== "time") return layout.roundAt(lane.rounds, view.position, view.align);
      const lead = state.panelLanes().reduce((a, b) => (b.rounds.length > a.rounds.length ? b : a));
      if (lane === lead) return Math.min(view.position, last);
      const until = layout.elapsed(lead.rounds, view.position);
      let shown = Math.min(0, last);
      for (let index = 0; index <= last && layout.elapsed(lane.rounds, index) <= until + 1e-9; index++) shown = index;
      return shown;
    };

    /** Where a run that nobody has watched opens: the round in which the lanes gained most. */
    state.bestRound = () => {
      const gain = (index) => state.panelLanes().reduce((sum, lane) => sum + (lane.rounds[index] ? lane.rounds[index].tokens.length : 0), 0);
      let best = 0;
      for (let index = 1; index <= state.limit(); index++) if (gain(index) > gain(best)) best = index;
      return best;
    };

    /** The node of a round whose contemplate token became the next round's future token; null if it
     * is not known (yet). */
    state.successor = (lane, index) => {
      const next = lane.rounds[index + 1];
      return next && next.future && next.future.born_round === index ? next.future.born_node : null;
    };

    /** Nothing of a round without a tree happens in phases. */
    state.phaseOf = (record) => (record.tree.token_ids.length > 1 && !view.follow ? view.phase : LANDING);

    // ---- Moves ---------------------------------------------------------------------------------

    /** Where the slider stands, also while following. */
    state.place = () => (view.follow ? state.limit() : view.position);

    state.moveTo = (position, phase) => {
      view.follow = false;
      view.position = Math.max(0, Math.min(position, state.limit()));
      view.phase = phase;
      if (!view.pinned) view.selected = null;
      view.budget = {};
      view.predict.guess = {};
    };

    state.hold = () => {
      view.position = state.place();
      view.follow = false;
    };

    state.setAlign = (align) => {
      const lane = state.panelLanes()[0];
      const index = lane ? Math.max(0, state.current(lane)) : 0;
      view.align = align;
      if (lane) view.position = align === "text" ? layout.starts(lane.rounds)[index] || 0 : index;
    };

    /** Show a lane's panel; with two on show already, the older one goes. */
    state.showLane = (name) => {
      if (view.solo) view.solo = name;
      if (!view.shown.includes(name)) {
        const order = state.panelLanes().map((lane) => lane.name);
        view.shown = [...view.shown.slice(-1), name].sort((a, b) => order.indexOf(a) - order.indexOf(b));
      }
      view.tab = name;
    };

    // ---- What is selected, everywhere ----------------------------------------------------------

    /** The answer positions [from, to) of the selection, as far as it became text; else null. */
    state.selectedSpan = () => {
      const chosen = view.selected;
      const lane = chosen && state.laneOf(chosen.lane);
      const record = lane && lane.rounds[chosen.round];
      if (!record) return null;
      const start = layout.starts(lane.rounds)[chosen.round];
      const end = start + record.tokens.length;
      if (chosen.node === null) return [start, end];
      if (chosen.node === "bonus") return [end - 1, end];
      const step = record.path.indexOf(chosen.node);
      return step >= 0 && start + step < end ? [start + step, start + step + 1] : null;
    };

    /** The round of a lane that the selection belongs to, or that wrote the same place of the text
     * in this lane; -1 without one. */
    state.pointedRound = (lane) => {
      const chosen = view.selected;
      if (!chosen || !lane.rounds.length) return -1;
      if (chosen.lane === lane.name) return chosen.round;
      const span = state.selectedSpan();
      if (!span) return -1;
      const index = layout.roundAt(lane.rounds, span[0], "text");
      const end = layout.starts(lane.rounds)[index] + lane.rounds[index].tokens.length;
      return span[0] < end ? index : -1;
    };

    /** The node on show in a lane that wrote the same place of the text as the selected token of
     * another lane: a number or "bonus"; null without one. */
    state.twinNode = (lane) => {
      const chosen = view.selected;
      if (!chosen || chosen.lane === lane.name || chosen.node === null) return null;
      const index = state.current(lane);
      if (index < 0 || state.pointedRound(lane) !== index) return null;
      const record = lane.rounds[index];
      const step = state.selectedSpan()[0] - layout.starts(lane.rounds)[index];
      return step < record.path.length ? record.path[step] : "bonus";
    };

    // ---- Predict, then reveal ------------------------------------------------------------------

    state.togglePredict = () => {
      view.predict.on = !view.predict.on;
      Object.assign(view.predict, { guess: {}, right: 0, asked: 0, counted: new Set() });
      if (state.run && view.predict.on) {
        state.hold();
        if (view.position === 0) view.position = Math.min(1, state.limit());
      }
      view.phase = view.predict.on ? 1 : LANDING;
    };

    /** The learner expects the target to agree down to `node` and no further. */
    state.guess = (lane, node, last) => {
      const { predict } = view;
      const key = `${lane.name}/${state.current(lane)}`;
      predict.guess[lane.name] = node;
      if (!predict.counted.has(key)) {
        predict.counted.add(key);
        predict.asked += 1;
        if (node === last) predict.right += 1;
      }
      view.phase = LANDING;
    };

    return state;
  }

  return { create, LANDING };
})(typeof confuLayout === "undefined" ? require("./layout.js") : confuLayout);

if (typeof module !== "undefined") module.exports = confuState;
