// What happened in a round, in plain words. Sentences come from the string table; here is only the
// choice of the sentence and its figures. A sentence is a list of strings and {token} objects, so
// that the page can set tokens apart. Pure; tests run it in Node.

const confuStory = ((layout) => {
  /**
   * A speaker for one language. Plural forms are keys with a suffix (`key.one`) chosen by `n`.
   */
  function speaker(language, table, fallback) {
    const rules = new Intl.PluralRules(language);
    const pattern = (key, parameters) => {
      const n = parameters && parameters.n;
      const plural = typeof n === "number" ? `${key}.${rules.select(n)}` : key;
      return table[plural] ?? table[key] ?? fallback[plural] ?? fallback[key] ?? key;
    };
    /** The sentence as parts; {name} places hold strings, numbers or {token} objects. */
    const parts = (key, parameters = {}) => {
      const out = [];
      for (const piece of pattern(key, parameters).split(/(\{[a-z_]+\})/)) {
        const name = /^\{([a-z_]+)\}$/.exec(piece);
        const value = name && name[1] in parameters ? parameters[name[1]] : piece;
        if (value && typeof value === "object") out.push(value);
        else if (value !== "") out.push(String(value));
      }
      return out;
    };
    const say = (key, parameters) =>
      parts(key, parameters)
        .map((part) => (typeof part === "string" ? part : `“${layout.visible(part.token, 24)}”`))
        .join("");
    return { say, parts, language };
  }

  const tok = (text) => ({ token: text });
  const percent = layout.percent;

  /** What a round is about to do, before it is decided. */
  function pending(speech, lane, record, phase) {
    const rides = phase === "check" && record.contemplated.length > 0;
    return speech.parts(`story.pending_${phase}${rides ? "_confu" : ""}`, {
      method: speech.say(`method.${lane.method}`), n: record.tree.token_ids.length - 1, riding: record.contemplated.length,
    });
  }

  function lastOf(record) {
    return record.path.length ? record.path[record.path.length - 1] : 0;
  }

  function bonusOf(record) {
    const last = record.tokens[record.tokens.length - 1];
    return last && last.origin === "bonus" ? last : null;
  }

  /** One or two sentences: what was drafted, what one pass decided, what was gained. */
  function round(speech, lane, record, promptTokens) {
    const method = speech.say(`method.${lane.method}`);
    const bonus = bonusOf(record);
    const newest = record.tokens[record.tokens.length - 1];
    if (record.index === 0) {
      if (!newest) return speech.parts("story.prefill_empty", { n: promptTokens });
      const key = record.contemplate_router.length || record.contemplated.length
        ? "story.prefill_confu" : "story.prefill";
      return speech.parts(key, { n: promptTokens, token: tok(newest.text) });
    }
    if (record.tree.token_ids.length < 2) {
      return newest ? speech.parts("story.plain", { token: tok(newest.text) }) : [];
    }
    const figures = {
      method,
      drafted: record.tree.token_ids.length - 1,
      accepted: record.path.length,
      gained: record.tokens.length,
      token: bonus ? tok(bonus.text) : "",
      n: record.path.length,
    };
    if (!bonus) return speech.parts("story.ended_inside", figures);
    return speech.parts(record.path.length ? "story.round" : "story.round_none", figures);
  }

  /** Why the accepted path ended where it did. */
  function ending(speech, record) {
    const tree = record.tree;
    if (tree.token_ids.length < 2) return [];
    const bonus = bonusOf(record);
    const last = lastOf(record);
    if (!bonus) return speech.parts(`story.stop_${record.stop || "length"}`, {});
    const guesses = layout.childrenOf(tree)[last];
    if (!guesses.length) return speech.parts("story.leaf", { last: tok(tree.texts[last]) });
    return speech.parts("story.disagreement", {
      last: tok(tree.texts[last]),
      guess: tok(tree.texts[guesses[0]]),
      draft: percent(tree.draft_probs[guesses[0]]),
      token: tok(bonus.text),
      target: percent(tree.choice_probs[last]),
    });
  }

  /** Where the future token that steered this draft came from. */
  function steering(speech, lane, record) {
    const future = record.future;
    if (!future) return [];
    const birth = lane.rounds[future.born_round];
    const text =
      birth && birth.tree.texts.length > future.born_node
        ? birth.tree.texts[future.born_node]
        : birth && birth.tokens.length ? birth.tokens[0].text : null;
    if (future.born_round === 0 || text === null) return speech.parts("story.steered_prefill", {});
    // With few contemplate tokens the nearest one stands in, a little stale.
    const { depths } = birth.tree;
    const stale = depths.length ? depths[lastOf(birth)] - depths[future.born_node] : 0;
    return speech.parts(stale > 0 ? "story.steered_stale" : "story.steered", { round: future.born_round, node: tok(text), n: stale });
  }

  /** One sentence on why a node has its state. */
  function node(speech, record, index) {
    const tree = record.tree;
    if (index === 0) return speech.parts("story.node_root", { token: tok(tree.texts[0]) });
    const parent = tree.parents[index];
    const figures = {
      token: tok(tree.texts[index]),
      parent: tok(tree.texts[parent]),
      draft: percent(tree.draft_probs[index]),
      target: percent(tree.target_probs[index]),
      choice: tok(tree.choice_texts[parent]),
      choice_prob: percent(tree.choice_probs[parent]),
    };
    const state = tree.states[index];
    if (state === "accepted") return speech.parts("story.node_accepted", figures);
    if (state === "rejected") return speech.parts("story.node_rejected", figures);
    const line = layout.lineage(tree, index);
    const culprit = line.find((at) => tree.states[at] === "rejected");
    if (culprit === undefined) return speech.parts("story.node_after_end", figures);
    return speech.parts("story.node_not_reached", { ...figures, above: tok(tree.texts[culprit]) });
  }

  function bonus(speech, record) {
    const own = bonusOf(record);
    const last = lastOf(record);
    if (!own) return [];
    if (!record.tree.texts.length) return speech.parts("story.bonus_plain", { token: tok(own.text) });
    const key = layout.childrenOf(record.tree)[last].length ? "story.bonus_correction" : "story.bonus_full";
    return speech.parts(key, {
      token: tok(own.text),
      parent: tok(record.tree.texts[last]),
      target: percent(record.tree.choice_probs[last]),
    });
  }

  return { speaker, pending, round, ending, steering, node, bonus, bonusOf, lastOf };
})(typeof confuLayout === "undefined" ? require("./layout.js") : confuLayout);

if (typeof module !== "undefined") module.exports = confuStory;
