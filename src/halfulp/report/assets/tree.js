"use strict";
// The picture of the model: modules as wide as their weights, coloured by what arrives. Made of what page.js has.
function modelTree({ shares, ramp, count, percent, make, several }) {
  return function tree(target, model, run, grid) {
    const g = run.grids.indexOf(grid);
    if (g < 0) return target.replaceChildren(make("p", run.name, "panel-title"), make("p", grid + " was not audited in this run.", "note"));
    const [lost, gain, stuck] = [model.lost, model.arrives, model.stuck].map((x) => shares(x[g]));
    const arrives = lost.map((x, i) => (gain[i] != null ? gain[i] : x == null ? null : 1 - x));
    const children = model.labels.map(() => []), of = ramp(), space = "http://www.w3.org/2000/svg";
    model.parents.forEach((p, i) => p >= 0 && children[p].push(i));
    const path = (i) => (model.parents[i] < 0 ? (model.labels[i] === "the model" ? [] : [model.labels[i]]) : [...path(model.parents[i]), model.labels[i]]);
    const make_svg = (name, given, text) => {
      const node = document.createElementNS(space, name);
      Object.entries(given).forEach(([k, v]) => node.setAttribute(k, v));
      if (text != null) node.textContent = text;
      return node;
    };
    const tell = (i) => {
      const many = model.tensors[i] > 1 ? ` in ${count(model.tensors[i])} tensors` : model.shapes[i] ? ` (${model.shapes[i]})` : "";
      return `${path(i).join(".") || model.labels[i]}: ${count(model.weights[i])} weights${many}; ` +
        (lost[i] == null ? "not part of any step" : `${percent(lost[i])} of updates lost on ${run.grids[g]}`) +
        (gain[i] == null ? "" : `, ${percent(gain[i])} arrives`) + (stuck[i] == null ? "" : `, ${percent(stuck[i])} never moved`);
    };
    let top = 0;

    function draw_from(start, focus) {
      top = start;
      target.replaceChildren();
      if (several) target.append(make("p", run.name, "panel-title"));
      const width = Math.max(200, target.clientWidth), high = window.innerWidth < 600 ? 30 : 26, boxes = [];
      const lay = (i, x, w, row) => {
        boxes.push([i, x, w, row]);
        if (!children[i].length) return;
        const least = Math.min(4, w / children[i].length), total = model.weights[i] || 1;
        const wide = children[i].map((c) => Math.max(least, (w * model.weights[c]) / total));
        const scale = w / wide.reduce((a, b) => a + b, 0);
        let at = x;
        children[i].forEach((c, k) => { if (wide[k] * scale >= 0.5) lay(c, at, wide[k] * scale, row + 1); at += wide[k] * scale; });
      };
      lay(top, 0, width, 0);
      const svg = make_svg("svg", { width, height: high * (1 + Math.max(...boxes.map((b) => b[3]))), role: "tree", "aria-label": "Modules, as wide as their weights" });
      const made = new Map();
      for (const [i, x, w, row] of boxes) {
        const share = arrives[i], colour = share == null ? null : of(1 - share);
        const item = make_svg("g", { role: "treeitem", tabindex: i === top ? 0 : -1, "aria-label": tell(i), "aria-level": row + 1 });
        item.append(make_svg("rect", { x: x + 0.5, y: row * high + 0.5, width: Math.max(0.5, w - 1), height: high - 1, rx: 2,
          fill: colour ? `rgb(${colour})` : "transparent", class: colour ? "" : "none" }));
        const fits = Math.floor((w - 10) / 6.9), label = model.labels[i];
        if (fits > 1) {
          const light = colour && 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 140;
          item.append(make_svg("text", { x: x + 5, y: row * high + high / 2 + 4.5, class: colour ? (light ? "dark" : "light") : "" },
            label.length <= fits ? label : label.slice(0, fits - 1) + "…"));
        }
        item.append(make_svg("title", {}, tell(i)));
        item.addEventListener("click", () => choose(i));
        item.addEventListener("focus", () => { readout.textContent = tell(i); made.forEach((m) => m.setAttribute("tabindex", -1)); item.setAttribute("tabindex", 0); });
        item.addEventListener("keydown", (event) => keys(event, i));
        made.set(i, item);
        svg.append(item);
      }
      const readout = make("p", tell(focus == null ? top : focus), "readout node");
      readout.setAttribute("aria-live", "polite");
      const up = make("button", top ? "Back to " + (path(model.parents[top]).join(".") || "the model") : "", "key");
      up.type = "button";
      up.hidden = !top;
      up.addEventListener("click", () => draw_from(model.parents[top], model.parents[top]));
      target.append(svg, readout, up);
      const choose = (i) => {
        if (i === top && i) return draw_from(model.parents[i], i);
        if (children[i].length && i !== top) return draw_from(i, i);
        made.get(i).focus();
      };
      const keys = (event, i) => {
        const beside = model.parents[i] < 0 ? [i] : children[model.parents[i]].filter((c) => made.has(c)), at = beside.indexOf(i);
        const to = { ArrowLeft: beside[at - 1], ArrowRight: beside[at + 1], ArrowDown: children[i].find((c) => made.has(c)),
          ArrowUp: i === top ? null : model.parents[i] }[event.key];
        if (to != null && made.has(to)) made.get(to).focus();
        else if (event.key === "Enter" || event.key === " ") choose(i);
        else if (event.key === "Escape" && top) draw_from(model.parents[top], top);
        else if (!event.key.startsWith("Arrow")) return;
        event.preventDefault();
      };
      if (focus != null && made.has(focus)) made.get(focus).focus();
    }
    draw_from(0, null);
  };
}
