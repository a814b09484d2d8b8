// Draws the charts of a page by uPlot: cursors move together, a drag zooms, a double click resets.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const places = [...document.querySelectorAll(".plot")];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const shown = (value) => (value == null ? "–" : Math.abs(value) >= 1000
    ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : String(+value.toPrecision(4)));
  let drawn = [];

  function line(one, index, chart) {
    const faint = one.label === "each step";
    const found = one.values.filter((value) => value !== null).length;
    const stroke = colour("--c" + (one.colour ?? index) % 8);
    return {
      label: one.label,
      stroke: faint ? stroke + "66" : stroke,
      width: faint ? 1 : 2,
      spanGaps: true,
      points: { show: found > 0 && found < 30, size: 6, fill: stroke },
      value: (_, value) => shown(value),
    };
  }

  function options(chart, width) {
    const axis = {
      stroke: colour("--soft"), font: "12px system-ui, sans-serif",
      grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 },
    };
    const wide = (_, values) => 16 + 7 * Math.max(3, ...(values ?? []).map((text) => text.length));
    const numbers = (_, values) => values.map(shown);
    const last = chart.x[chart.x.length - 1];
    return {
      width, height: 220, scales: { x: { time: false, range: (_, min, max) => min === max ? [0, last] : [min, max] } },
      axes: [{ ...axis, values: numbers, space: 60 }, { ...axis, values: numbers, size: wide }],
      series: [{ label: "step", value: (_, value) => shown(value) }, ...chart.lines.map((one, i) => line(one, i, chart))],
      cursor: { sync: { key: "step" }, drag: { x: true, y: false } },
    };
  }

  function draw() {
    drawn.forEach((plot) => plot.destroy());
    drawn = places.map((place, i) => new uPlot(
      options(charts[i], place.clientWidth), [charts[i].x, ...charts[i].lines.map((one) => one.values)], place));
  }

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("resize", () => drawn.forEach((plot, i) => plot.setSize({ width: places[i].clientWidth, height: 220 })));
})();
