"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const css = name => getComputedStyle(root).getPropertyValue(name).trim();
  const dark = () => css("color-scheme") === "dark" || (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const make = (tag, cls, text) => { const e = document.createElement(tag); if (cls) e.className = cls; if (text !== undefined) e.textContent = text; return e; };
  const DASH = "–";

  // --- numbers, written as in the rest of the report ---
  const digits = v => { const a = Math.abs(v); return a < 10 ? 2 : a < 100 ? 1 : 0; };
  const count = v => {
    if (v == null) return DASH;
    const units = ["", "k", "M", "B", "T"]; let i = 0;
    while (i < 4 && Math.abs(v) >= 999.5) { v /= 1000; i++; }
    return (i === 0 && Number.isInteger(v) ? String(v) : v.toFixed(digits(v))) + units[i];
  };
  const seconds = v => v == null ? DASH : v < 1 ? (v * 1000).toFixed(v < 0.1 ? 1 : 0) + " ms" : v < 120 ? v.toFixed(digits(v)) + " s" : (v / 60).toFixed(1) + " min";
  const formats = {
    loss: v => v == null ? DASH : v !== 0 && (Math.abs(v) < 0.001 || Math.abs(v) >= 1e4) ? v.toExponential(3) : v.toFixed(4),
    rate: v => v == null ? DASH : v.toExponential(2),
    percent: v => v == null ? DASH : (100 * v).toFixed(1) + " %",
    count, seconds, number: v => v == null ? DASH : v.toFixed(digits(v)),
  };
  const tickFormats = {
    loss: v => v == null ? "" : Math.abs(v) >= 1e4 || (v && Math.abs(v) < 1e-3) ? v.toExponential(0) : String(+v.toPrecision(6)),
    rate: v => v == null ? "" : v === 0 ? "0" : v.toExponential(1),
    percent: v => v == null ? "" : +(100 * v).toPrecision(4) + " %",
    count: v => v == null ? "" : Math.abs(v) >= 999.5 ? count(v).replace(/(\.\d*?)0+(?=\D)/, "$1").replace(/\.(?=\D)/, "") : String(+v.toPrecision(4)),
    seconds: v => v == null ? "" : v === 0 ? "0" : v < 1 ? +(v * 1000).toPrecision(3) + " ms" : +v.toPrecision(4) + " s",
    number: v => v == null ? "" : String(+v.toPrecision(4)),
  };
  const xName = { step: v => "step " + v.toLocaleString("en"), tokens: v => count(v) + " trained tokens", hours: v => v.toFixed(v < 10 ? 2 : 1) + " h" };
  const xTick = { step: tickFormats.count, tokens: tickFormats.count, hours: v => +v.toPrecision(4) + " h" };

  let axis = "step";
  let plots = [];
  const sync = uPlot.sync("report");
  const color = pair => pair[dark() ? 1 : 0];

  // Vertical marks where a session began or something happened; only steps have them, other axes do not.
  const markHook = u => {
    if (axis !== "step" || !data.marks.length) return;
    const { ctx, bbox } = u;
    ctx.save(); ctx.strokeStyle = css("--faint"); ctx.setLineDash([3, 3]); ctx.lineWidth = 1;
    for (const mark of data.marks) {
      const x = Math.round(u.valToPos(mark.step, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    }
    ctx.restore();
  };

  const axes = (format, width) => {
    const ink = css("--faint"), grid = css("--grid");
    const common = { stroke: ink, font: "11px " + css("--sans"), grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    return [
      { ...common, values: (u, ticks) => ticks.map(v => v == null ? "" : xTick[axis](v)), space: 70, size: 22, gap: 6 },
      { ...common, values: (u, ticks) => ticks.map(tickFormats[format]), size: width < 480 ? 54 : 60, gap: 6, space: 32 },
    ];
  };

  // A card's keys show the values under the cursor, or the last ones.
  const keysOf = (card, series, toggle) => {
    const keys = make("div", "keys");
    const cells = series.map((item, index) => {
      const key = make("button", "key"); key.type = "button";
      const dot = make("i"); dot.style.background = color(item.color);
      const value = make("b", "", DASH);
      key.append(dot, item.name, value);
      key.onclick = () => { key.classList.toggle("off"); toggle(index, !key.classList.contains("off")); };
      keys.append(key);
      return value;
    });
    card.append(keys);
    return cells;
  };

  const lastOf = values => { for (let i = values.length - 1; i >= 0; i--) if (values[i] != null) return values[i]; return null; };

  function draw(card, at, cells, xs, columns, options) {
    const holder = make("div", "plot");
    card.append(holder);
    const show = idx => {
      at.textContent = idx == null || xs[idx] == null ? "" : xName[axis](xs[idx]) + (options.extra ? options.extra(idx) : "");
      cells.forEach((cell, i) => { cell.textContent = options.value(i, idx); });
    };
    const u = new uPlot({
      width: Math.max(240, holder.clientWidth), height: options.height,
      legend: { show: false }, padding: [8, 18, 0, 0],
      cursor: { sync: { key: sync.key, setSeries: false, scales: ["x", null] }, points: { size: 6 }, focus: { prox: -1 }, y: false, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: options.scale },
      axes: axes(options.format, holder.clientWidth), series: [{}, ...options.series], bands: options.bands,
      hooks: { draw: [markHook], setCursor: [self => show(self.cursor.idx)] },
    }, [xs, ...columns], holder);
    show(null);
    plots.push({ u, holder });
    return u;
  }

  function lineChart(parent, chart) {
    const card = make("div", "card"), head = make("div", "chead"), at = make("span", "at");
    head.append(make("h3", "", chart.title), make("span", "unit", chart.unit));
    card.append(head); parent.append(card);
    const render = () => {
      card.querySelectorAll(".keys, .plot").forEach(e => e.remove());
      // Other axes than steps do not hold steps that were done again: they have no place on them.
      const rows = chart.x[axis].map((x, i) => x == null ? -1 : i).filter(i => i >= 0);
      const xs = rows.map(i => chart.x[axis][i]);
      const columns = chart.series.map(item => rows.map(i => { const v = item.values[i]; return chart.log && !(v > 0) || item.byStep && axis !== "step" ? null : v; }));
      // Nobody trained between two sessions: no line across that time.
      if (axis === "hours") for (const row of [...chart.breaks].reverse()) {
        const i = rows.indexOf(row);
        if (i < 1) continue;
        xs.splice(i, 0, (xs[i - 1] + xs[i]) / 2);
        columns.forEach(column => column.splice(i, 0, null));
      }
      let u;
      const cells = keysOf(card, chart.series, (i, on) => u.setSeries(i + 1, { show: on }));
      const narrow = rows.length < 40;
      u = draw(card, at, cells, xs, columns, {
        height: parent.firstChild === card ? 280 : 210, format: chart.format,
        scale: chart.log ? { distr: 3 } : { range: (self, lo, hi) => padded(lo, hi, chart.format) },
        series: chart.series.map(item => ({
          stroke: color(item.color), width: item.wide ? 2 : 1, spanGaps: item.dots,
          points: { show: item.dots || narrow, size: item.dots ? 6 : 5, fill: color(item.color) },
        })),
        value: (i, idx) => formats[chart.format](idx == null ? lastOf(columns[i]) : columns[i][idx]),
      });
    };
    if (chart.canLog) {
      const log = make("button", "toggle", "log"); log.type = "button"; log.setAttribute("aria-pressed", "false");
      log.onclick = () => { chart.log = !chart.log; log.classList.toggle("on", chart.log); log.setAttribute("aria-pressed", String(chart.log)); redraw(); };
      head.append(log);
    }
    head.append(at);
    return render;
  }

  // Rates and shares start at zero, or a small change would look like a large one; losses and norms do not.
  function padded(lo, hi, format) {
    if (lo == null || hi == null) return [0, 1];
    const zero = ["count", "percent", "number", "seconds", "rate"].includes(format);
    if (zero) return [0, (hi || 1) * 1.06];
    const room = (hi - lo || Math.abs(hi) || 1) * 0.06;
    return [lo >= 0 ? Math.max(0, lo - room) : lo - room, hi + room];
  }

  function stackChart(card, account) {
    const head = card.querySelector(".chead"), at = make("span", "at"); head.append(at);
    return () => {
      card.querySelectorAll(".keys, .plot").forEach(e => e.remove());
      const hidden = new Set(); let u;
      const one = account.step.length === 1;
      const xs = one ? [account.step[0] - 0.5, account.step[0] + 0.5] : account.step;
      const shares = account.series.map(item => one ? [item.values[0], item.values[0]] : item.values);
      const bands = account.series.slice(1).map((_, i) => ({ series: [i + 2, i + 1] }));
      const stacked = () => {
        const sum = xs.map(() => 0);
        return shares.map((values, s) => values.map((v, i) => (sum[i] += hidden.has(s) ? 0 : v)));
      };
      const cells = keysOf(card, account.series, (i, on) => { on ? hidden.delete(i) : hidden.add(i); u.setData([xs, ...stacked()]); });
      const mean = shares.map(values => weighted(values, account));
      u = draw(card, at, cells, xs, stacked(), {
        height: 260, format: "percent", scale: { range: [0, 1] }, bands,
        series: account.series.map(item => ({ stroke: color(item.color), fill: color(item.color), width: 0.5, points: { show: false } })),
        value: (i, idx) => formats.percent(idx == null ? mean[i] : shares[i][idx]) + (idx == null ? "" : " · " + seconds(shares[i][idx] * account.seconds[one ? 0 : idx])),
        extra: idx => " · " + seconds(account.seconds[one ? 0 : idx]) + " a step" + (account.steps[one ? 0 : idx] > 1 ? ", mean of " + account.steps[one ? 0 : idx] : ""),
      });
      at.dataset.fixed = axis;
    };
  }

  function weighted(values, account) {
    let part = 0, whole = 0;
    account.seconds.forEach((s, i) => { const w = s * account.steps[i]; part += values[i] * w; whole += w; });
    return part / whole;
  }

  const renders = [];
  const grid = document.getElementById("charts");
  if (grid) data.charts.forEach(chart => renders.push(lineChart(grid, chart)));
  const stack = document.getElementById("stack");
  if (stack) { if (data.account) renders.push(stackChart(stack, data.account)); else stack.remove(); }
  const heatCard = document.getElementById("heat");
  if (heatCard) { if (data.ranks && data.ranks.maps.length) renders.push(headwayHeat(heatCard, data.ranks, { css, dark, make, seconds })); else heatCard.remove(); }

  function redraw() { plots.forEach(p => p.u.destroy()); plots = []; renders.forEach(render => render()); }
  document.querySelectorAll("#axis button").forEach(button => button.onclick = () => {
    axis = button.dataset.axis;
    document.querySelectorAll("#axis button").forEach(b => b.classList.toggle("on", b === button));
    redraw();
  });
  document.getElementById("theme").onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let timer;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(redraw, 120); });
  redraw();
})();
