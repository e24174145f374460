// What a reader can take away: the trace, a picture of a tree, the whole run as one HTML file.
// Everything is made in the page from what it already holds.

const confuExport = (({ el }) => {
  const DRAWN = [
    "fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size",
    "font-weight", "font-style",
  ];

  function download(name, blob) {
    const url = URL.createObjectURL(blob);
    const link = el("a", { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  /** The run in the trace's own schema, so that the program reads it back. */
  function toTrace(run) {
    const lanes = Object.fromEntries(run.lanes.map(({ name, ...lane }) => [name, lane]));
    return { ...run.header, lanes };
  }

  function trace(run) {
    if (!run) return;
    const text = JSON.stringify(toTrace(run));
    download("confu-trace.json", new Blob([text], { type: "application/json" }));
  }

  /** JSON that can stand inside a script element. */
  function inScript(value) {
    return JSON.stringify(value).replaceAll("<", "\\u003c").replaceAll("\u2028", "\\u2028");
  }

  function pageText(run, assets, speech, source) {
    const message = {
      run: "saved", seq: 0, kind: "full", state: run.state === "running" ? "stopped" : run.state,
      language: speech.language, trace: toTrace(run), source: { kind: "recorded" },
    };
    return [
      "<!doctype html>",
      `<html lang="${speech.language}"><head><meta charset="utf-8">`,
      '<meta name="viewport" content="width=device-width, initial-scale=1">',
      // The page holds a model's words: nothing but its own script may run or load.
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; " +
        "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">",
      "<title>ConFu Explorer</title></head><body class=\"cfx-page\"><main id=\"player\"></main><script>",
      'if (matchMedia("(prefers-color-scheme: dark)").matches) document.body.classList.add("dark");',
      `const bundle = ${source};`,
      `const assets = ${inScript(assets)};`,
      'const player = bundle()(document.getElementById("player"), assets, { source: String(bundle) });',
      `player.receive(JSON.stringify(${inScript(message)}));`,
      "</" + "script></body></html>", // split: this very text is saved inside a script element
    ].join("\n");
  }

  function page(run, assets, speech, source) {
    if (!run) return;
    const text = pageText(run, assets, speech, source);
    download("confu-run.html", new Blob([text], { type: "text/html" }));
  }

  /** A copy of a drawing that needs no style sheet. */
  function standalone(canvas) {
    const copy = canvas.cloneNode(true);
    const originals = [canvas, ...canvas.querySelectorAll("*")];
    const copies = [copy, ...copy.querySelectorAll("*")];
    copies.forEach((node, i) => {
      const computed = getComputedStyle(originals[i]);
      for (const name of DRAWN) node.setAttribute(name, computed.getPropertyValue(name));
      for (const name of ["class", "style", "id", "role"]) node.removeAttribute(name);
    });
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    paper.setAttribute("width", "100%");
    paper.setAttribute("height", "100%");
    paper.setAttribute("fill", getComputedStyle(canvas.closest(".cfx")).backgroundColor);
    copy.prepend(paper);
    return new XMLSerializer().serializeToString(copy);
  }

  function picture(canvas, name) {
    download(`${name}.svg`, new Blob([standalone(canvas)], { type: "image/svg+xml" }));
  }

  function bitmap(canvas, name) {
    const scale = 2;
    const image = new Image();
    const url = URL.createObjectURL(new Blob([standalone(canvas)], { type: "image/svg+xml" }));
    image.onload = () => {
      const board = el("canvas", { width: canvas.clientWidth * scale, height: canvas.clientHeight * scale });
      board.getContext("2d").drawImage(image, 0, 0, board.width, board.height);
      URL.revokeObjectURL(url);
      board.toBlob((blob) => download(`${name}.png`, blob), "image/png");
    };
    image.src = url;
  }

  return { trace, page, picture, bitmap, pageText, toTrace };
})(confuDom);
