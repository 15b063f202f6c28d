"use strict";
// Draws the charts of a halfulp page from the packed numbers in #data. Words and tables are in the HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const percent = (x) => (x == null ? "-" : x > 0 && x < 0.0005 ? "<0.1%" : x < 1 && x > 0.9995 ? ">99.9%" : (100 * x).toFixed(1) + "%");
  const count = (x) => x.toLocaleString("en");
  const DASHES = [[], [9, 4]]; // every second line is dashed, so that one shows through another
  const COLOURS = 8;

  // ---- numbers ------------------------------------------------------------------------------------------

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const shares = (text) => {
    const view = new DataView(bytes(text).buffer);
    return Array.from({ length: view.byteLength / 2 }, (_, i) => {
      const code = view.getUint16(2 * i, true);
      return code === 65535 ? null : code / 65534;
    });
  };
  const middle = (steps) => steps[0].map((first, i) => (first + steps[1][i]) / 2);
  const range = (a, b) => (a === b ? "step " + count(a) : "steps " + count(a) + " to " + count(b));

  // ---- looks --------------------------------------------------------------------------------------------

  const root = document.documentElement;
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const colour = (i) => css("--c" + (i % COLOURS));
  const font = () => "12px " + getComputedStyle(document.body).fontFamily;
  const POLICIES = { fp32: 6, rne: 1, sr: 0, eco: 2, "deadzone-sr": 5, kahan: 3, master: 4 };

  const make = (element, text, classes) => {
    const made = document.createElement(element);
    if (text != null) made.textContent = text;
    if (classes) made.className = classes;
    return made;
  };

  const swatch = (stroke, dash) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const set = (node, given) => Object.entries(given).forEach(([k, v]) => node.setAttribute(k, v));
    set(svg, { width: 26, height: 10, "aria-hidden": "true" });
    set(line, { x1: 1, x2: 25, y1: 5, y2: 5, stroke, "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") });
    svg.append(line);
    return svg;
  };

  // ---- a chart of lines -----------------------------------------------------------------------------------

  // lines: {name, x, y, low?, high?, index, dash?, marks?, where?}; options: share, log, label, height
  function chart(target, lines, options) {
    target.replaceChildren();
    if (options.title) target.append(make("p", options.title, "panel-title"));
    const box = make("div", null, "plot");
    const legend = make("div", null, "legend");
    const readout = make("p", "", "readout");
    readout.setAttribute("aria-live", "polite");
    target.append(box, legend, readout);

    const columns = [], series = [{}], bands = [], plotted = [];
    for (const line of lines) {
      const stroke = colour(line.index), dash = line.dash || DASHES[line.index % DASHES.length];
      line.stroke = stroke;
      line.place = series.length;
      series.push({ label: line.name, stroke, width: 2, dash, points: { show: line.y.length < 2 }, spanGaps: true });
      columns.push([line.x, line.y]);
      if (line.low) {
        const [r, g, b] = [1, 3, 5].map((i) => parseInt(stroke.slice(i, i + 2), 16));
        const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        series.push(edge, edge);
        bands.push({ series: [series.length - 1, series.length - 2], fill: `rgba(${r},${g},${b},0.16)` });
        columns.push([line.x, line.low], [line.x, line.high]);
      }
      plotted.push(line);
    }
    const joined = uPlot.join(columns);
    const ink = css("--muted"), rule = css("--rule");
    const axis = { stroke: ink, font: font(), grid: { stroke: rule, width: 1 }, ticks: { show: false }, border: { show: false } };
    const log = options.log && joined[0][0] > 0;

    const plot = new uPlot(
      {
        width: Math.max(200, box.clientWidth),
        height: options.height || (window.innerWidth < 600 ? 240 : 320),
        legend: { show: false },
        padding: [10, 24, 0, 0],
        scales: {
          x: { time: false, distr: log ? 3 : 1, range: (u, a, b) => (a === b ? [Math.max(a - 0.5, log ? 0.5 : -Infinity), b + 0.5] : [a, b]) },
          y: options.share ? { range: [0, 1] } : {},
        },
        axes: [
          { ...axis, size: 34, space: 60, values: (u, ticks) => ticks.map((x) => (x == null || x % 1 ? "" : count(x))),
            label: "step", labelSize: 18, labelFont: font(), labelGap: 0 },
          { ...axis, size: 48, values: (u, ticks) => ticks.map((x) => (options.share ? Math.round(100 * x) + "%" : x.toFixed(2))) },
        ],
        cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
        series, bands,
        hooks: {
          drawAxes: [(u) => { if (options.share) half(u); }],
          draw: [(u) => plotted.forEach((line) => marks(u, line))],
          setCursor: [(u) => read(u)],
        },
      },
      joined, box,
    );

    const values = plotted.map((line) => {
      const item = make("button", null, "key");
      item.type = "button";
      item.setAttribute("aria-pressed", "true");
      item.append(swatch(line.stroke, series[line.place].dash || []), make("span", line.name, "key-name"));
      const value = item.appendChild(make("span", "", "key-value"));
      item.addEventListener("click", () => {
        const show = !plot.series[line.place].show;
        item.setAttribute("aria-pressed", String(show));
        [0, 1, 2].slice(0, line.low ? 3 : 1).forEach((k) => plot.setSeries(line.place + k, { show }));
      });
      legend.append(item);
      return value;
    });

    function read(u) {
      const i = u.cursor.idx;
      plotted.forEach((line, k) => {
        const y = i == null ? null : u.data[line.place][i];
        values[k].textContent = y == null ? "" : options.share ? percent(y) : y.toFixed(3);
      });
      readout.textContent = i == null ? "" : options.where ? options.where(u.data[0][i]) : "step " + count(u.data[0][i]);
    }

    function half(u) {
      const y = u.valToPos(0.5, "y", true), { left, width } = u.bbox;
      u.ctx.save();
      u.ctx.strokeStyle = css("--muted");
      u.ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
      u.ctx.lineWidth = devicePixelRatio;
      u.ctx.beginPath();
      u.ctx.moveTo(left, y);
      u.ctx.lineTo(left + width, y);
      u.ctx.stroke();
      u.ctx.restore();
    }

    function marks(u, line) {
      if (!line.marks || !u.series[line.place].show) return;
      const [step, at] = line.marks, r = 4.5 * devicePixelRatio;
      if (step < u.scales.x.min || step > u.scales.x.max) return;
      u.ctx.save();
      u.ctx.fillStyle = line.stroke;
      u.ctx.strokeStyle = css("--paper");
      u.ctx.lineWidth = 1.5 * devicePixelRatio;
      u.ctx.beginPath();
      u.ctx.arc(u.valToPos(step, "x", true), u.valToPos(at, "y", true), r, 0, 2 * Math.PI);
      u.ctx.fill();
      u.ctx.stroke();
      u.ctx.restore();
    }

    box.tabIndex = 0;
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", options.label);
    box.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (!by) return;
      event.preventDefault();
      const xs = plot.data[0], i = Math.min(xs.length - 1, Math.max(0, (plot.cursor.idx ?? -1) + by));
      plot.setCursor({ left: plot.valToPos(xs[i], "x"), top: 1 });
    });
    return plot;
  }

  // ---- the model ----------------------------------------------------------------------------------------

  function ramp() {
    const stops = ["--heat0", "--heat1", "--heat2"].map((n) => [1, 3, 5].map((i) => parseInt(css(n).slice(i, i + 2), 16)));
    return (share) => {
      const t = 2 * share, k = t < 1 ? 0 : 1, f = t - k;
      return [0, 1, 2].map((c) => Math.round(stops[k][c] * (1 - f) + stops[k + 1][c] * f));
    };
  }

  const tree = modelTree({ shares, ramp, count, percent, make, several: data.runs.length > 1 });

  // ---- the page -----------------------------------------------------------------------------------------

  const plots = [];
  const union = (lists) => [...new Set(lists.flat())];
  const panel = (parent) => parent.appendChild(make("div", null, "panel"));
  const value = (id, otherwise) => ($(id) ? $(id).value : otherwise);

  function fill(select, names, chosen) {
    if (!select) return;
    names.forEach((name, i) => select.append(new Option(name, String(i))));
    select.value = String(Math.max(0, names.indexOf(chosen)));
    select.closest("label").hidden = names.length < 2;
  }

  const scopeNames = union(data.runs.map((r) => r.scopes)), grids = union(data.runs.map((r) => r.grids));
  const WORDS = { stored: "the weights stored on each grid, or all", all: "all weights", "all-2d": "weight matrices", core: "attention and MLP" };
  if (data.runs.length) {
    fill($("scope"), scopeNames.map((s) => WORDS[s] || s), WORDS[data.runs[0].scopes[data.runs[0].scope]] || scopeNames[0]);
    fill($("grid"), grids, data.grid);
  }

  function curve(run, measure, scope, grid, index, name) {
    const s = run.scopes.indexOf(scope), g = run.grids.indexOf(grid);
    if (s < 0 || g < 0) return null;
    const [y, low, high] = run.curves[measure][s][g].map(shares);
    return { name, x: middle(run.steps), y, low, high, index, marks: measure === "frozen" ? run.marks[s][g] : null };
  }

  function drawWhen() {
    const target = $("when");
    if (!target || !data.runs.length) return;
    target.replaceChildren();
    const measure = value("measure", "frozen"), scope = scopeNames[Number(value("scope", 0))], grid = grids[Number(value("grid", 0))];
    const log = $("log").checked, byRuns = value("lines", "grids") === "runs";
    target.dataset.runs = byRuns ? 1 : data.runs.length;
    const what = $("measure").selectedOptions[0].textContent;
    const draw = (lines, title, where) => {
      const label = `${what}, ${scope}${title ? ", " + title : ""}: ` + lines.map((l) => {
        const seen = l.y.filter((y) => y != null);
        return `${l.name} from ${percent(seen[0])} to ${percent(seen[seen.length - 1])}`;
      }).join("; ");
      const at = panel(target);
      if (!lines.length) return void at.append(make("p", "Nothing of this scope here.", "note"));
      plots.push(chart(at, lines, { share: true, log, label, title, where }));
    };
    if (byRuns) {
      const lines = data.runs.map((run, i) => curve(run, measure, scope, grid, i, run.name)).filter(Boolean);
      draw(lines, "on " + grid, null);
    } else
      for (const run of data.runs) {
        const lines = run.grids.map((g) => curve(run, measure, scope, g, grids.indexOf(g), g)).filter(Boolean);
        const at = middle(run.steps);
        const where = (x) => { const i = at.indexOf(x); return i < 0 ? "step " + count(x) : range(run.steps[0][i], run.steps[1][i]); };
        draw(lines, data.runs.length > 1 ? run.name : "", where);
      }
  }

  function drawOutcomes() {
    document.querySelectorAll("[data-outcome]").forEach((target) => {
      const found = data.outcomes[Number(target.dataset.outcome)], x = middle(found.steps);
      const forecast = shares(found.forecast), measured = shares(found.measured);
      const off = (d) => forecast.map((y) => (y == null ? null : Math.min(1, Math.max(0, y + d))));
      const lines = [
        { name: found.rehearsed ? "projected" : "forecast", x, y: forecast, low: off(-found.band), high: off(found.band), index: 0, dash: [6, 3] },
        { name: "measured", x, y: measured, index: 1, dash: [] },
      ];
      if (found.rehearsed) lines.splice(1, 0, { name: "rehearsed", x, y: shares(found.rehearsed), index: 2, dash: [2, 3] });
      plots.push(chart(target, lines, { share: true, log: $("log") && $("log").checked, label: "Forecast and measured share of updates lost" }));
    });
  }

  function drawTrees() {
    const grid = grids[Number(value("grid", 0))];
    document.querySelectorAll("[data-tree]").forEach((target) => {
      const i = Number(target.dataset.tree);
      tree(target, data.trees[i], data.runs[i], grid);
    });
    document.querySelectorAll("[data-grid]").forEach((node) => { node.hidden = node.dataset.grid !== grid; });
  }

  document.querySelectorAll("[data-copy]").forEach((button) => {
    button.addEventListener("click", async () => {
      const paste = button.dataset.copy;
      try {
        await navigator.clipboard.writeText(paste);
      } catch {
        const range = document.createRange(); // a page from a disk may not write to the clipboard itself
        range.selectNodeContents(button.previousElementSibling);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  });

  function drawArms() {
    document.querySelectorAll("[data-arms]").forEach((target) => {
      const runs = data.arms[Number(target.dataset.arms)].runs;
      if (!runs.length) return;
      const lines = runs.map((r, i) => ({ name: r.name, x: middle(r.steps), y: r.loss, index: POLICIES[r.policy] ?? i, dash: r.policy === "fp32" ? [2, 3] : [] }));
      plots.push(chart(target, lines, { title: runs.length > 1 ? "Training loss" : "", label: "Training loss by policy", log: $("log") && $("log").checked }));
    });
  }

  function draw() {
    plots.splice(0).forEach((p) => p.destroy());
    drawTrees();
    drawWhen();
    drawOutcomes();
    drawArms();
  }

  let width = window.innerWidth, timer = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(timer);
    timer = setTimeout(draw, 150);
  });
  ["measure", "scope", "lines", "log", "grid"].forEach((id) => $(id) && $(id).addEventListener("change", draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("beforeprint", () => { root.classList.add("paper"); draw(); });
  window.addEventListener("afterprint", () => { root.classList.remove("paper"); draw(); });
  draw();
  root.dataset.drawn = "true";
})();
