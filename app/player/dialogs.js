// Dialogs: the keys, the words, and a link to this view.

const confuDialogs = (({ el }) => {
  const KEYS = ["← →", "Home End", "Space", "a b", "↑ ↓ ← →", "Enter", "Esc", "t", "?"];

  function create(stage, dialog, glossary) {
    const { say } = stage;
    const bodies = { help, glossary: words, link };

    function open(kind) {
      const close = el("button", { type: "button", class: "cfx-button cfx-close", text: say("action.close"), onclick: () => dialog.close() });
      dialog.replaceChildren(el("h2", { text: say(`dialog.${kind}`) }), bodies[kind](), close);
      dialog.setAttribute("aria-label", say(`dialog.${kind}`));
      dialog.showModal();
    }

    function help() {
      return el("table", { class: "cfx-table" }, el("tbody", {}, ...KEYS.map((keys, i) =>
        el("tr", {}, el("td", {}, el("kbd", { text: keys })), el("td", { text: say(`help.${i}`) })))));
    }

    function words() {
      return el("dl", { class: "cfx-glossary" }, ...glossary.flatMap((word) => [
        el("dt", { text: say(`glossary.${word}`) }), el("dd", { text: say(`glossary.${word}_means`) })]));
    }

    /** The link to copy by hand. A visitor's own prompt goes into it only if they say so. */
    function link() {
      const share = el("input", { type: "checkbox", onchange: () => { field.value = stage.linkTo(share.checked); } });
      const field = el("input", { class: "cfx-link-field", readonly: true, value: stage.linkTo(false), "aria-label": say("dialog.link") });
      const copy = el("button", {
        type: "button", class: "cfx-button cfx-primary", text: say("action.copy"),
        onclick: () => { field.select(); stage.copy(field.value, copy, "action.copy"); },
      });
      return el("div", {}, field, el("p", {}, el("label", {}, share, " ", say("link.with_prompt"))), copy);
    }

    return { open };
  }

  return { create };
})(confuDom);
