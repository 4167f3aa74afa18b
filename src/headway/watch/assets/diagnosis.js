"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const css = name => getComputedStyle(root).getPropertyValue(name).trim();
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const make = (tag, cls, text) => { const e = document.createElement(tag); if (cls) e.className = cls; if (text !== undefined) e.textContent = text; return e; };
  const color = pair => pair[dark() ? 1 : 0];
  const digits = v => { const a = Math.abs(v); return a < 10 ? 2 : a < 100 ? 1 : 0; };
  const seconds = v => v == null ? "–" : v < 0.001 ? (v * 1e6).toFixed(0) + " µs" : v < 1 ? (v * 1000).toFixed(v < 0.1 ? 2 : 0) + " ms" : v < 120 ? v.toFixed(digits(v)) + " s" : (v / 60).toFixed(1) + " min";
  const percent = v => (100 * v).toFixed(1) + " %";

  // Columns whose layers are shares of 1; below them a lane for each stream and one for the steps.
  function slices(card, { layers, weights = layers[0].values.map(() => 1), lanes = [], steps = [], at, ends }) {
    const keys = make("div", "keys"), canvas = make("canvas", "slices"), note = make("p", "at");
    card.append(keys, canvas, note);
    const number = layers[0].values.length, left = lanes.length || steps.length ? 76 : 40, tall = 220, lane = 15;
    const whole = weights.reduce((a, b) => a + b, 0) || 1; // a longer column holds more of the time
    const mean = layers.map(layer => layer.values.reduce((sum, value, i) => sum + value * weights[i], 0) / whole);
    const top = steps.length ? 18 : 4;
    const height = top + tall + 18 + lanes.length * lane + (lanes.length ? 6 : 0);
    const keyTexts = layers.map((layer, i) => {
      const key = make("span", "key"), dot = make("i"), value = make("b", "", percent(mean[i]));
      key.append(dot, layer.name, value);
      if (mean[i] >= 0.0005) keys.append(key); // what cannot be seen needs no name
      return { dot, value };
    });
    const say = column => {
      keyTexts.forEach(({ value }, i) => { value.textContent = percent(column == null ? mean[i] : layers[i].values[column]); });
      note.textContent = column == null ? "" : at(column);
    };
    const column = event => {
      const i = Math.floor((event.offsetX - left) / (canvas.clientWidth - left) * number);
      return i >= 0 && i < number ? i : null;
    };
    canvas.onmousemove = event => say(column(event));
    canvas.onmouseleave = () => say(null);
    return () => {
      const width = canvas.clientWidth, ratio = devicePixelRatio || 1, cell = (width - left) / number;
      canvas.style.height = height + "px"; canvas.width = width * ratio; canvas.height = height * ratio;
      const ctx = canvas.getContext("2d"); ctx.scale(ratio, ratio);
      ctx.font = "11px " + css("--sans"); ctx.textBaseline = "middle";
      layers.forEach((layer, i) => { keyTexts[i].dot.style.background = color(layer.color); });
      for (let c = 0; c < number; c++) {
        let y = top + tall;
        for (const layer of layers) {
          const h = layer.values[c] * tall;
          ctx.fillStyle = color(layer.color);
          ctx.fillRect(left + c * cell, y - h, cell + 0.6, h + 0.3);
          y -= h;
        }
      }
      ctx.fillStyle = css("--faint"); ctx.textAlign = "right";
      for (const share of [0, 0.5, 1]) ctx.fillText(100 * share + " %", left - 6, Math.min(top + tall - 6, Math.max(top + 6, top + tall * (1 - share))));
      ctx.fillText(ends[1], width, top + tall + 10); ctx.textAlign = "left"; ctx.fillText(ends[0], left, top + tall + 10);
      steps.forEach((step, i) => {
        const x = left + step.from * (width - left), w = (step.to - step.from) * (width - left);
        ctx.fillStyle = i % 2 ? css("--grid") : css("--line"); ctx.fillRect(x, 0, w, 14);
        ctx.fillStyle = css("--dim");
        if (ctx.measureText(step.name).width + 8 < w) ctx.fillText(step.name, x + 4, 7);
        ctx.fillStyle = css("--ink"); if (i) { ctx.globalAlpha = 0.45; ctx.fillRect(x - 0.5, 0, 1, top + tall); ctx.globalAlpha = 1; }
      });
      lanes.forEach((row, r) => {
        const y = top + tall + 22 + r * lane;
        ctx.fillStyle = css("--dim"); ctx.fillText(fit(ctx, row.name, left - 8), 0, y + lane / 2 - 1);
        ctx.fillStyle = css("--grid"); ctx.fillRect(left, y, width - left, lane - 3);
        row.full.forEach((full, c) => {
          if (!full) return;
          ctx.globalAlpha = 0.25 + 0.75 * full; ctx.fillStyle = color(data.kinds[row.of[c]].color);
          ctx.fillRect(left + c * cell, y, cell + 0.6, lane - 3);
        });
        ctx.globalAlpha = 1;
      });
    };
  }

  function fit(ctx, text, width) {
    if (ctx.measureText(text).width <= width) return text;
    while (text.length > 1 && ctx.measureText(text + "…").width > width) text = text.slice(0, -1);
    return text + "…";
  }

  const paints = [];
  const cards = { run: document.getElementById("runsteps"), device: document.getElementById("slices"), heat: document.getElementById("heat") };
  if (data.account) {
    const a = data.account;
    paints.push(slices(cards.run, {
      layers: a.series, weights: a.seconds.map((s, i) => s * a.steps[i]), ends: ["step " + a.step[0].toLocaleString("en"), a.step[a.step.length - 1].toLocaleString("en")],
      at: i => "step " + a.step[i].toLocaleString("en") + ": " + seconds(a.seconds[i]) + (a.steps[i] > 1 ? ", mean of " + a.steps[i] + " steps" : ""),
    }));
  } else cards.run.remove();
  if (data.timeline) {
    const t = data.timeline, number = t.layers[0].values.length;
    paints.push(slices(cards.device, {
      ...t, ends: ["0", seconds(t.seconds)],
      at: i => "from " + seconds(t.seconds * i / number) + " on, a slice of " + seconds(t.seconds / number),
    }));
  } else cards.device.remove();
  if (!data.account && !data.timeline) document.getElementById("timeline").remove();
  if (data.ranks && data.ranks.maps.length) {
    paints.push(headwayHeat(cards.heat, data.ranks, { css, dark, make, seconds }));
    document.getElementById("onerank")?.remove();
  } else cards.heat.remove();

  const redraw = () => paints.forEach(paint => paint());
  document.getElementById("theme").onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let timer;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(redraw, 120); });
  redraw();
})();
