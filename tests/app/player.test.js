// The player's arithmetic and sentences, without a page. Run by tests/app/test_player.py.

const test = require("node:test");
const assert = require("node:assert");
const fs = require("node:fs");
const path = require("node:path");

const PLAYER = path.join(__dirname, "..", "..", "app", "player");
const layout = require(path.join(PLAYER, "layout.js"));
const story = require(path.join(PLAYER, "story.js"));
const states = require(path.join(PLAYER, "state.js"));
const strings = JSON.parse(fs.readFileSync(path.join(PLAYER, "..", "text", "en.json"), "utf8"));
const speech = story.speaker("en", strings, strings);

test("the map keeps one scale, y upwards, and strays on the rim", () => {
  const at = layout.mapScale([[0, 0], [10, 5]], 100, 10);
  assert.deepStrictEqual(at([5, 2.5]), [50, 50]);
  assert.deepStrictEqual(at([0, 0]), [10, 70]);
  assert.deepStrictEqual(at([10, 5]), [90, 30]);
  assert.deepStrictEqual(at([99, 99]), [95, 5]);
  assert.deepStrictEqual(layout.mapScale([[3, 3]], 100, 10)([3, 3]), [50, 50]); // a single point
});

/** A seeded random tree of `count` nodes. */
function randomTree(count, seed) {
  let state = seed + 1;
  const random = () => (state = (state * 16807) % 2147483647) / 2147483647;
  const tree = { token_ids: [], texts: [], parents: [], depths: [], draft_probs: [], scores: [], target_probs: [], states: [], choice_ids: [], choice_texts: [], choice_probs: [] };
  for (let node = 0; node < count; node++) {
    const parent = node === 0 ? -1 : Math.floor(random() * node);
    const prob = node === 0 ? 1 : 0.05 + 0.9 * random();
    tree.token_ids.push(node);
    tree.texts.push(` w${node}`);
    tree.parents.push(parent);
    tree.depths.push(node === 0 ? 0 : tree.depths[parent] + 1);
    tree.draft_probs.push(prob);
    tree.scores.push(node === 0 ? 0 : tree.scores[parent] + Math.log(prob));
    tree.target_probs.push(random());
    tree.states.push(node === 0 ? "accepted" : "not reached");
    tree.choice_ids.push(0);
    tree.choice_texts.push(" x");
    tree.choice_probs.push(0.5);
  }
  return tree;
}

function deepest(tree) {
  const last = tree.scores.indexOf(Math.min(...tree.scores));
  return layout.lineage(tree, last).slice(1);
}

function options(tree, more) {
  return {
    path: [], bonus: { lines: ["◆ on", "50%"] }, rows: 11,
    lines: (node) => [`✓ ${layout.visible(tree.texts[node], 14)}`, "50% → 50%"], ...more,
  };
}

const overlap = (a, b) =>
  a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;

for (const outline of [false, true]) {
  for (const count of [1, 2, 30, 60, 200]) {
    test(`place: ${count} nodes, ${outline ? "outline" : "tree"}`, () => {
      for (let seed = 0; seed < 8; seed++) {
        const tree = randomTree(count, seed);
        const path = deepest(tree);
        const drawing = layout.place(tree, options(tree, { path, outline, rows: 14 }));
        const nodes = drawing.boxes.filter((box) => box.kind === "node");
        const folded = drawing.boxes.filter((box) => box.kind === "fold");
        const hidden = folded.reduce((sum, box) => sum + box.count, 0);
        assert.strictEqual(nodes.length + hidden, count, "every node is drawn or counted");
        for (const node of [0, ...path]) assert.ok(nodes.some((box) => box.node === node));
        const solid = drawing.boxes.filter((box) => box.kind !== "fold");
        for (let i = 0; i < solid.length; i++) {
          assert.ok(solid[i].x + solid[i].width <= drawing.width);
          assert.ok(solid[i].y + solid[i].height <= drawing.height);
          for (let j = i + 1; j < solid.length; j++) assert.ok(!overlap(solid[i], solid[j]));
        }
        const whole = layout.place(tree, options(tree, { path, outline, rows: 10000 }));
        assert.strictEqual(whole.boxes.filter((box) => box.kind === "node").length, count);
      }
    });
  }
}

test("place: folding goes down to the asked rows unless the path needs more", () => {
  const tree = randomTree(60, 3);
  const drawing = layout.place(tree, options(tree, { path: deepest(tree) }));
  const rows = new Set(drawing.boxes.map((box) => box.row)).size;
  assert.ok(rows <= 13, `${rows} rows`);
});

test("place: an opened node shows its children", () => {
  const tree = randomTree(60, 5);
  const closed = layout.place(tree, options(tree));
  const fold = closed.boxes.find((box) => box.kind === "fold");
  const opened = layout.place(tree, options(tree, { open: new Set([fold.node]) }));
  const children = layout.childrenOf(tree)[fold.node];
  for (const child of children) assert.ok(opened.boxes.some((box) => box.kind === "node" && box.node === child));
});

test("place is quick enough for a stream", () => {
  const tree = randomTree(200, 1);
  const begin = process.cpuUsage(); // other work on the machine does not count
  for (let i = 0; i < 10; i++) layout.place(tree, options(tree));
  const { user, system } = process.cpuUsage(begin);
  assert.ok((user + system) / 1000 / 10 < 30);
});

test("visible: nothing hides and nothing is markup-dependent", () => {
  assert.strictEqual(layout.visible(" a\n\t\r"), "␣a↵⇥␍");
  assert.strictEqual(layout.visible("\u202eevil"), "U+202Eevil");
  assert.strictEqual(layout.visible("\x00\x1b\x7f"), "␀␛U+007F");
  assert.strictEqual(layout.visible("\ud83d"), "U+D83D");
  assert.strictEqual(layout.visible("👩\u200d🔬"), "👩U+200D🔬");
  assert.strictEqual(layout.visible("<img onerror=1>"), "<img␣onerror=1>");
  assert.strictEqual(layout.visible("x".repeat(200), 14).length, 14);
  assert.strictEqual(layout.clippedParts("x".repeat(200), 14).map((p) => p.text).join("").length, 14);
});

test("percent never says 0 or 100 for what is neither", () => {
  assert.deepStrictEqual([0, 0.001, 0.5, 0.997, 1].map(layout.percent), ["0%", "<1%", "50%", ">99%", "100%"]);
});

const tokens = (...ids) => ids.map((id) => ({ id, text: ` t${id}`, origin: "bonus", margin: 1 + id / 10 }));
const rounds = (...groups) =>
  groups.map((group, index) => ({ index, tokens: tokens(...group), seconds: { draft: 0.1, verify: 0.2, rest: 0 }, stop: null }));

test("a chosen expert's weight is never nothing", () => {
  assert.deepStrictEqual([0.0001, 0.005, 0.5, 0.9999].map(layout.weight), ["<0.01", "0.01", "0.50", "1.00"]);
});

test("roundAt finds the round of a text position", () => {
  const list = rounds([1], [2, 3, 4], [5]);
  assert.deepStrictEqual([0, 1, 2, 3, 4, 9].map((p) => layout.roundAt(list, p, "text")), [0, 1, 1, 1, 2, 2]);
  assert.deepStrictEqual([0, 1, 9].map((p) => layout.roundAt(list, p, "round")), [0, 1, 2]);
  assert.strictEqual(layout.roundAt([], 3, "round"), -1);
});

test("bars fill exactly their share", () => {
  const lanes = [{ rounds: rounds([1], [2], [3], [4]) }, { rounds: rounds([1], [2, 3, 4]) }];
  const scale = layout.timelineScale(lanes);
  for (const align of ["round", "text", "time"]) {
    const bars = layout.bars(lanes[0].rounds, align, scale);
    const last = bars[bars.length - 1];
    assert.ok(Math.abs(last.x + last.width - 1) < 1e-9, align);
  }
  const text = layout.bars(lanes[1].rounds, "text", scale);
  assert.strictEqual(text[1].width, 0.75);
});

test("speed counts the bonus token and leaves the prefill out", () => {
  const figures = layout.speedOf(rounds([1], [2, 3, 4], [5]));
  assert.deepStrictEqual([figures.passes, figures.tokens, figures.tau], [2, 5, 2]);
  assert.strictEqual(layout.speedOf(rounds([1])).tau, 0);
});

test("firstDifference: the same, another token, a lane that ended early", () => {
  const lane = (list, stop) => {
    if (stop) list[list.length - 1].stop = stop;
    return { rounds: list, error: null };
  };
  assert.strictEqual(layout.firstDifference(lane(rounds([1], [2])), lane(rounds([1, 2]))), null);
  assert.strictEqual(layout.firstDifference(lane(rounds([1], [2])), lane(rounds([1, 3]))).index, 1);
  assert.strictEqual(layout.firstDifference(lane(rounds([1], [2, 3])), lane(rounds([1]))), null);
  const ended = layout.firstDifference(lane(rounds([1], [2, 3]), "length"), lane(rounds([1]), "eos"));
  assert.strictEqual(ended.index, 1);
  const stopped = layout.firstDifference(lane(rounds([1], [2, 3]), "length"), lane(rounds([1]), "cancelled"));
  assert.strictEqual(stopped, null);
});

test("withBudget keeps a tree and never accepts more than the whole", () => {
  for (let seed = 0; seed < 10; seed++) {
    const tree = randomTree(40, seed);
    const path = deepest(tree);
    let before = 0;
    for (let budget = 1; budget <= 40; budget++) {
      const { kept, accepted } = layout.withBudget(tree, path, budget);
      for (const node of kept) assert.ok(node === 0 || kept.has(tree.parents[node]));
      assert.ok(accepted >= before && accepted <= path.length);
      before = accepted;
    }
    assert.strictEqual(before, path.length);
  }
});

test("cameTrue compares words, not spaces or capitals", () => {
  assert.strictEqual(layout.cameTrue(" Sky", [{ text: " blue" }, { text: "sky" }]), 2);
  assert.strictEqual(layout.cameTrue(" ", [{ text: " " }]), 0);
});

test("sentences have no open places in any state", () => {
  const tree = randomTree(12, 2);
  const path = layout.lineage(tree, 11).slice(1);
  tree.states = tree.states.map((_, n) => (n === 0 || path.includes(n) ? "accepted" : path.concat(0).includes(tree.parents[n]) ? "rejected" : "not reached"));
  const record = (more) => ({
    index: 3, tree, path, tokens: tokens(...path, 99), contemplated: [], contemplate_router: [], stop: null,
    future: { born_round: 2, born_node: 1, readings: [] }, ...more,
  });
  const lane = { method: "confu", rounds: [record(), record(), record(), record()] };
  const all = [
    story.round(speech, lane, record(), 20),
    story.round(speech, lane, record({ path: [], tokens: tokens(99) }), 20),
    story.round(speech, lane, record({ tokens: tokens(...path).map((t) => ({ ...t, origin: "accepted" })), stop: "eos" }), 20),
    story.round(speech, lane, record({ index: 0, tree: randomTree(0, 0), path: [] }), 20),
    story.ending(speech, record()),
    story.steering(speech, lane, record()),
    story.bonus(speech, record()),
    ...tree.parents.map((_, n) => story.node(speech, record(), n)),
  ];
  for (const parts of all) {
    const text = parts.map((p) => (typeof p === "string" ? p : p.token)).join("");
    assert.ok(text.length > 5);
    assert.ok(!/[{}]|undefined|NaN/.test(text), text);
  }
});

test("a token that looks like a place stays a token", () => {
  const parts = speech.parts("story.plain", { token: { token: "{method}<b>" } });
  assert.ok(parts.some((part) => part.token === "{method}<b>"));
});

// ---- What the player holds ---------------------------------------------------------------------

const empty = () => randomTree(0, 0);
const lane = (method, list = []) => ({ method, head: null, rounds: list, text: "", error: null });
const round = (index, ids) => ({ index, tree: empty(), path: [], tokens: tokens(...ids), seconds: { draft: 0, verify: 0.1 * (index + 1), rest: 0 }, stop: null });
const header = (lists = {}) => ({
  settings: { max_new_tokens: 8 },
  lanes: Object.fromEntries(["plain", "eagle3", "confu"].map((name) => [name, lane(name, lists[name])])),
});
const step = (run, seq, name, record) => ({ run, seq, kind: "step", lane: name, record, text: "t" });

function started() {
  const state = states.create();
  state.receive({ run: "r", seq: 0, kind: "reset", source: { kind: "live" }, trace: header() });
  return state;
}

test("steps grow the lanes, and the newest round is on show", () => {
  const state = started();
  state.receive(step("r", 1, "confu", round(0, [1])));
  state.receive(step("r", 2, "confu", round(1, [2, 3])));
  assert.strictEqual(state.laneOf("confu").rounds.length, 2);
  assert.strictEqual(state.current(state.laneOf("confu")), 1);
  assert.strictEqual(state.current(state.laneOf("eagle3")), -1);
});

test("a hole waits for full; another run's steps are dropped", () => {
  const state = started();
  state.receive(step("r", 1, "confu", round(0, [1])));
  state.receive(step("r", 3, "confu", round(1, [2])));
  state.receive(step("r", 4, "confu", round(1, [2])));
  state.receive(step("other", 2, "confu", round(1, [2])));
  assert.strictEqual(state.laneOf("confu").rounds.length, 1);
  state.receive({ run: "r", seq: 5, kind: "full", state: "finished", source: { kind: "live" }, trace: header({ confu: [round(0, [1]), round(1, [2])] }) });
  assert.strictEqual(state.laneOf("confu").rounds.length, 2);
  assert.strictEqual(state.run.state, "finished");
});

test("full keeps the reader's place in the same run only", () => {
  const state = started();
  const rounds = [round(0, [1]), round(1, [2]), round(2, [3])];
  rounds.forEach((record, i) => state.receive(step("r", i + 1, "confu", record)));
  state.moveTo(1, 4);
  const full = (run) => ({ run, seq: 9, kind: "full", state: "finished", source: { kind: "live" }, trace: header({ confu: rounds }) });
  state.receive(full("r"));
  assert.deepStrictEqual([state.view.position, state.view.follow], [1, false]);
  state.receive({ ...full("new"), position: 2 });
  assert.strictEqual(state.view.position, 2);
});

test("a link's step is used by the next run that nobody scrubbed", () => {
  const state = started();
  state.receive({ run: "x", seq: 0, kind: "language", language: "en", step: 1 });
  state.receive({ run: "r", seq: 9, kind: "full", state: "finished", source: { kind: "live" }, trace: header({ confu: [round(0, [1]), round(1, [2]), round(2, [3])] }) });
  assert.strictEqual(state.view.position, 1);
});

test("a link's phase is the next run's, and a step beyond the end is told", () => {
  const rounds = [round(0, [1]), round(1, [2]), round(2, [3])];
  const full = (run, more) => ({ run, seq: 9, kind: "full", state: "finished", source: { kind: "live" }, trace: header({ confu: rounds }), ...more });
  const state = started();
  state.receive({ run: "x", seq: 0, kind: "language", language: "en", step: 9, phase: 1, hide: ["card"] });
  assert.deepStrictEqual([state.beyond, [...state.view.hidden]], [null, ["card"]]);
  state.receive(full("r"));
  assert.deepStrictEqual([state.view.position, state.view.phase, state.beyond], [2, 1, 9]);
  state.receive(full("s", { position: 1, phase: 3 }));
  assert.deepStrictEqual([state.view.position, state.view.phase, state.beyond], [1, 3, null]);
  state.receive(full("t", { hide: [] }));
  assert.deepStrictEqual([state.view.phase, state.view.hidden.size], [states.LANDING, 0]);
});

test("in order of time a lane stands where its clock stands", () => {
  const state = states.create();
  const slow = [round(0, [1]), round(1, [2]), round(2, [3])];
  const quick = slow.map((r) => ({ ...r, seconds: { draft: 0, verify: 0.01, rest: 0 } })).slice(0, 2);
  state.receive({ run: "r", seq: 0, kind: "full", state: "finished", source: { kind: "file" }, trace: header({ eagle3: slow, confu: quick }) });
  state.setAlign("time");
  state.moveTo(0, 4);
  assert.strictEqual(state.current(state.laneOf("confu")), 1);
  assert.strictEqual(state.current(state.laneOf("eagle3")), 0);
});

test("two lanes at most are on show, links choose which", () => {
  const state = states.create();
  const trace = header();
  trace.lanes.changed = { ...lane("confu"), intervention: { change: "remove future" } };
  state.receive({ run: "r", seq: 0, kind: "full", state: "finished", source: { kind: "live" }, trace });
  assert.deepStrictEqual(state.view.shown, ["confu", "changed"]);
  state.showLane("eagle3");
  assert.deepStrictEqual(state.view.shown, ["eagle3", "changed"]);
  state.receive({ run: "q", seq: 0, kind: "full", state: "finished", source: { kind: "live" }, trace, panels: ["eagle3", "junk"] });
  assert.deepStrictEqual(state.view.shown, ["eagle3"]);
});

test("a guess counts once per round", () => {
  const state = started();
  state.receive(step("r", 1, "confu", { ...round(0, [1]), tree: randomTree(5, 1) }));
  state.togglePredict();
  state.guess(state.laneOf("confu"), 2, 2);
  state.guess(state.laneOf("confu"), 3, 2);
  assert.deepStrictEqual([state.view.predict.right, state.view.predict.asked], [1, 1]);
});

// ---- One selection for everything ----------------------------------------------------------------

/** EAGLE-3 wrote tokens 1 | 2 3 | 4, ConFu 1 | 2 3 4: other rounds, the same text. */
function twoLanes() {
  const state = states.create();
  const tree = randomTree(4, 1);
  tree.parents = [-1, 0, 1, 0];
  const drafted = (index, ids, path) => ({ ...round(index, ids), tree, path });
  const lists = {
    eagle3: [round(0, [1]), drafted(1, [2, 3], [1]), drafted(2, [4], [])],
    confu: [round(0, [1]), drafted(1, [2, 3, 4], [1, 2])],
  };
  state.receive({ run: "r", seq: 0, kind: "full", state: "finished", source: { kind: "live" }, trace: header(lists) });
  state.moveTo(1, 4);
  return state;
}

test("a selected token is found in the text and in the other lane", () => {
  const state = twoLanes();
  const [eagle3, confu] = ["eagle3", "confu"].map(state.laneOf);
  state.view.selected = { lane: "confu", round: 1, node: 2 }; // the second accepted node: token 3
  assert.deepStrictEqual(state.selectedSpan(), [2, 3]);
  assert.deepStrictEqual([state.pointedRound(confu), state.pointedRound(eagle3)], [1, 1]);
  assert.strictEqual(state.twinNode(eagle3), "bonus");
  assert.strictEqual(state.twinNode(confu), null);
  state.view.selected = { lane: "confu", round: 1, node: "bonus" }; // token 4: a round later there
  assert.strictEqual(state.pointedRound(eagle3), 2);
  assert.strictEqual(state.twinNode(eagle3), null);
  state.view.selected = { lane: "eagle3", round: 1, node: 1 };
  assert.strictEqual(state.twinNode(confu), 1);
});

test("a node that never became text points at its own round only", () => {
  const state = twoLanes();
  state.view.selected = { lane: "confu", round: 1, node: 3 };
  assert.strictEqual(state.selectedSpan(), null);
  assert.strictEqual(state.pointedRound(state.laneOf("confu")), 1);
  assert.strictEqual(state.pointedRound(state.laneOf("eagle3")), -1);
});

test("a whole round is selected without a node", () => {
  const state = twoLanes();
  state.view.selected = { lane: "confu", round: 1, node: null };
  assert.deepStrictEqual(state.selectedSpan(), [1, 4]);
  assert.strictEqual(state.pointedRound(state.laneOf("eagle3")), 1);
  assert.strictEqual(state.twinNode(state.laneOf("eagle3")), null);
});

test("full of the same run keeps the lanes themselves, so that nothing is built anew", () => {
  const state = started();
  state.receive(step("r", 1, "confu", round(0, [1])));
  const lane = state.laneOf("confu");
  const anew = state.receive({ run: "r", seq: 2, kind: "full", state: "finished", source: { kind: "live" }, trace: header({ confu: [round(0, [1]), round(1, [2])] }) });
  assert.deepStrictEqual([anew, state.laneOf("confu") === lane, lane.rounds.length, lane.name], [false, true, 2, "confu"]);
});

test("the node whose contemplate token steers the next round", () => {
  const state = twoLanes();
  const lane = state.laneOf("confu");
  assert.strictEqual(state.successor(lane, 0), null);
  lane.rounds[1].future = { born_round: 0, born_node: 0, readings: [], point: null };
  assert.strictEqual(state.successor(lane, 0), 0);
  lane.rounds[1].future.born_round = 5; // of another prompt
  assert.strictEqual(state.successor(lane, 0), null);
});

test("a future token that is a little stale says so", () => {
  const tree = randomTree(3, 1);
  Object.assign(tree, { parents: [-1, 0, 1], depths: [0, 1, 2] });
  const birth = { index: 1, tree, path: [1, 2], tokens: tokens(1, 2, 3) };
  const next = (node) => ({ future: { born_round: 1, born_node: node, readings: [] } });
  const told = (node) => story.steering(speech, { rounds: [birth, birth] }, next(node)).map((p) => p.token ?? p).join("");
  assert.ok(!told(2).includes("before"), told(2));
  assert.ok(told(1).includes("one token before"), told(1));
  assert.ok(told(0).includes("2 tokens before"), told(0));
});

test("contemplate tokens ride along in the check, and in the check alone", () => {
  const record = { tree: randomTree(5, 1), contemplated: [0, 1, 2] };
  const told = (phase) => story.pending(speech, { method: "confu" }, record, phase).join("");
  assert.ok(told("check").includes("3 contemplate tokens"), told("check"));
  assert.ok(!told("draft").includes("contemplate"), told("draft"));
});

test("a reading has eight tokens to come true", () => {
  const list = [[1], [2, 3, 4, 5], [6, 7, 8], [9, 10]].map((ids) => ({ tokens: tokens(...ids) }));
  assert.deepStrictEqual(layout.tokensAfter(list, 1).map((token) => token.id), [2, 3, 4, 5, 6, 7, 8, 9]);
  assert.deepStrictEqual(layout.tokensAfter(list, 3).map((token) => token.id), [9, 10]);
});
