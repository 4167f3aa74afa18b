"use strict";
// Ranks by time: who took longer than the others, and when. Columns are steps, or what a map calls its own.
function headwayHeat(card, ranks, { css, dark, make, seconds }) {
  const choose = document.getElementById("heatpath"), canvas = make("canvas"), at = make("p", "fine at");
  card.insertBefore(canvas, card.querySelector(".fine")); card.insertBefore(at, canvas);
  let current = 0;
  ranks.maps.forEach((map, i) => {
    const button = make("button", i ? "" : "on", map.name); button.type = "button";
    button.onclick = () => { current = i; [...choose.children].forEach((b, j) => b.classList.toggle("on", i === j)); paint(); };
    choose.append(button);
  });
  const left = 64;
  const columns = () => ranks.maps[current].columns || ranks.step, word = () => ranks.maps[current].word || "step";
  const geometry = () => {
    const width = canvas.clientWidth, rows = ranks.ranks.length, row = Math.max(7, Math.min(26, 420 / rows));
    return { width, row, height: rows * row + 20, cell: (width - left) / columns().length };
  };
  function paint() {
    const map = ranks.maps[current], { width, row, height, cell } = geometry(), ratio = devicePixelRatio || 1;
    canvas.style.height = height + "px"; canvas.width = width * ratio; canvas.height = height * ratio;
    const ctx = canvas.getContext("2d"); ctx.scale(ratio, ratio);
    const off = map.values.map(line => line.map((v, i) => v - map.mean[i]));
    const most = Math.max(1e-12, ...off.map(line => Math.max(...line.map(Math.abs))));
    const hot = dark() ? "229,105,92" : "192,57,43", cold = dark() ? "107,155,242" : "59,111,212";
    ctx.font = "11px " + css("--sans"); ctx.textBaseline = "middle";
    off.forEach((line, r) => {
      line.forEach((v, i) => {
        ctx.fillStyle = `rgba(${v > 0 ? hot : cold},${(0.04 + 0.96 * Math.abs(v) / most).toFixed(3)})`;
        ctx.fillRect(left + i * cell, r * row, Math.ceil(cell), row - 1);
      });
      if (row >= 11 || r % Math.ceil(11 / row) === 0) { ctx.fillStyle = css("--dim"); ctx.fillText("rank " + ranks.ranks[r], 0, r * row + row / 2); }
    });
    ctx.fillStyle = css("--faint");
    ctx.fillText(word() + " " + columns()[0].toLocaleString("en"), left, height - 8);
    if (columns().length > 1) { ctx.textAlign = "right"; ctx.fillText(columns()[columns().length - 1].toLocaleString("en"), width, height - 8); ctx.textAlign = "left"; }
    at.textContent = (ranks.ranks.length < ranks.world ? `the ${ranks.ranks.length} of ${ranks.world} ranks that differ most; ` : "") + "strongest colour: " + (100 * most / ranks.wall).toFixed(1) + " % of a step";
  }
  canvas.onmousemove = event => {
    const { row, cell } = geometry(), map = ranks.maps[current];
    const i = Math.floor((event.offsetX - left) / cell), r = Math.floor(event.offsetY / row);
    if (i < 0 || r < 0 || r >= ranks.ranks.length || i >= columns().length) return;
    const v = map.values[r][i], d = v - map.mean[i];
    at.textContent = `rank ${ranks.ranks[r]}${ranks.hosts[r] ? " on " + ranks.hosts[r] : ""}, ${word() === "step" ? "up to step" : word()} ${columns()[i].toLocaleString("en")}: ${seconds(v)}${word() === "step" ? " a step" : ""}, ${d < 0 ? "−" : "+"}${seconds(Math.abs(d))} against the mean`;
  };
  canvas.onmouseleave = () => paint();
  return paint;
}
