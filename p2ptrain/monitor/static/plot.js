// One chart, drawn by uPlot, with rounds, joins, leaves, failovers and alerts marked on its time axis.

/* global uPlot */

const HEIGHT = 176;
const MAX_ROUND_MARKS = 200;
const MAX_GAP_STEPS = 6; // A longer gap breaks the line.
const sync = "p2ptrain";

export function makePlot(chart, data, columns, onCursor) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = {
    stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false },
    font: "12px system-ui, sans-serif",
  };
  const order = chart.lines.map((_, index) => index);
  if (chart.stacked) order.reverse(); // Tallest first, so that the others are drawn over it.
  const { at, values } = withGaps(data, chart.stacked ? cumulative(columns) : columns);
  const series = order.map((index) => line(chart, colour(chart.lines[index][2]), chart.lines[index][3]));
  const options = {
    width: Math.max(160, chart.plot.clientWidth),
    height: HEIGHT,
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    legend: { show: false },
    padding: [8, 30, 0, 0],
    cursor: { sync: { key: sync }, drag: { x: false, y: false }, points: { size: 5 }, y: false },
    scales: { y: { range: (_, low, high) => range(chart, low, high) } },
    axes: [
      { ...axis, space: 60, size: 28, values: TIMES },
      { ...axis, size: 68, incrs: chart.whole ? WHOLE : undefined, values: (_, marks) => marks.map((mark) => (mark === null ? "" : chart.unit(mark))) },
    ],
    series: [{}, ...series],
    bands: chart.stacked ? order.slice(1).map((_, index) => ({ series: [index + 1, index + 2] })) : [],
    hooks: {
      setCursor: [(plot) => onCursor(Number.isInteger(plot.cursor.idx) ? data.at.indexOf(at[plot.cursor.idx]) : null)],
      draw: [(plot) => annotate(plot, data, colour)],
    },
  };
  chart.plot.replaceChildren();
  return new uPlot(options, [at, ...order.map((index) => values[index])], chart.plot);
}

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
const DAY = 86400;
const TIMES = [
  [DAY, "{MMM} {D}", null, null, null, null, null, null, 1],
  [60, "{HH}:{mm}", null, null, null, null, null, null, 1],
  [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1],
];

function line(chart, stroke, dash) {
  const filled = chart.stacked || chart.bars;
  return {
    stroke, dash, width: 1.5, fill: filled ? `${stroke}${chart.bars ? "" : "66"}` : undefined, points: { show: false },
    paths: chart.bars ? uPlot.paths.bars({ size: [0.8, 8] }) : undefined,
  };
}

function range({ fromZero, least = 1 }, low, high) {
  if (low === null || high === null) return [0, least];
  if (fromZero) return [0, Math.max(least, high * 1.1)];
  const space = Math.max((high - low) * 0.08, Math.abs(high) * 0.005, 1e-6);
  return [low - space, high + space];
}

function cumulative(columns) {
  const sums = columns[0].map(() => 0);
  return columns.map((column) => column.map((value, index) => {
    if (value === null) return null;
    sums[index] += value;
    return sums[index];
  }));
}

function withGaps({ at, step }, columns) {
  const times = [];
  const values = columns.map(() => []);
  at.forEach((time, index) => {
    if (index && time - at[index - 1] > MAX_GAP_STEPS * step) {
      times.push(at[index - 1] + step);
      for (const column of values) column.push(null);
    }
    times.push(time);
    columns.forEach((column, each) => values[each].push(column[index]));
  });
  return { at: times, values };
}

function annotate(plot, { events, rounds }, colour) {
  const { ctx, bbox } = plot;
  const { min, max } = plot.scales.x;
  const place = (at) => Math.round(plot.valToPos(at, "x", true));
  const unit = devicePixelRatio;
  const bottom = bbox.top + bbox.height;
  ctx.save();
  if (rounds.length <= MAX_ROUND_MARKS) {
    ctx.fillStyle = colour("--muted");
    for (const { at } of rounds) if (at >= min && at <= max) ctx.fillRect(place(at), bottom - 4 * unit, unit, 4 * unit);
  }
  for (const { at, kind } of events) {
    if (at < min || at > max) continue;
    const x = place(at);
    if (kind === "joined" || kind === "left") triangle(ctx, x, bbox.top + unit, 4 * unit, kind === "joined", colour);
    else if (kind === "failover") diamond(ctx, x, bbox.top + 8 * unit, 4 * unit, colour("--bad"));
    else if (kind !== "cleared") {
      ctx.strokeStyle = colour("--bad");
      ctx.lineWidth = unit;
      ctx.setLineDash([3 * unit, 3 * unit]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
    }
  }
  ctx.restore();
}

function diamond(ctx, x, y, size, fill) {
  ctx.fillStyle = fill;
  ctx.beginPath();
  ctx.moveTo(x - size, y);
  ctx.lineTo(x, y - size);
  ctx.lineTo(x + size, y);
  ctx.lineTo(x, y + size);
  ctx.fill();
}

function triangle(ctx, x, y, size, upwards, colour) {
  const [base, tip] = upwards ? [y + 1.5 * size, y] : [y, y + 1.5 * size];
  ctx.fillStyle = colour(upwards ? "--good" : "--warn");
  ctx.beginPath();
  ctx.moveTo(x - size, base);
  ctx.lineTo(x + size, base);
  ctx.lineTo(x, tip);
  ctx.fill();
}
