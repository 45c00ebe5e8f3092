// What the page shows, from the data beside it; and how it keeps up with the run.

let data = JSON.parse(document.getElementById('data').textContent);
const byId = id => document.getElementById(id);
const kept = { // Pages from a disk may share their storage, and browsers may refuse it to them.
  get: name => { try { return JSON.parse(sessionStorage.getItem(location.pathname + name)); } catch { return null; } },
  set: (name, value) => { try { sessionStorage.setItem(location.pathname + name, JSON.stringify(value)); } catch { /* forgotten, then */ } },
};

function span(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return '–';
  const s = Math.round(seconds), d = Math.floor(s / 86400), h = Math.floor(s / 3600) % 24, m = Math.floor(s / 60) % 60;
  if (d) return `${d} d ${h} h`;
  return h ? `${h} h ${m} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
}
const whole = n => n === null || n === undefined ? '–' : n.toLocaleString('en');
const percent = x => x === null || x === undefined ? '–' : (100 * x).toFixed(1) + '%';
const age = () => Date.now() / 1000 - data.state.time;
// A step may take minutes: silence is what is long against both.
const silent = () => !data.state.ended && age() > Math.max(600, 20 * (data.state.left / Math.max(1, data.run.num_steps - data.state.step) || 0));

function header() {
  const { run, state } = data, pill = byId('pill');
  const [kind, text] = state.ended ? (state.complete ? ['complete', 'finished'] : ['stopped', 'stopped'])
    : silent() ? ['silent', `no news for ${span(age())}`] : ['running', 'running'];
  pill.className = 'pill ' + kind;
  if (pill.textContent !== text) pill.textContent = text;
  byId('facts').textContent = [
    run.version, run.device, run.params && `${short(run.params[0])} parameters active, ${short(run.params[1])} stored`,
    run.tokens_per_step && `${whole(run.tokens_per_step)} tokens a step`,
    run.flops_per_token && `${short(run.flops_per_token).replace('B', 'G').replace(/(?=[kMGT]?$)/, ' ')}FLOP a token`,
    run.starts > 1 && `started ${run.starts} times`,
    state.unread > 0 && `${state.unread} lines of the log could not be read`,
  ].filter(Boolean).join(' · ');
  const bar = byId('bar');
  bar.hidden = !run.num_steps;
  if (run.num_steps) {
    bar.firstElementChild.style.width = `${Math.min(100, 100 * state.step / run.num_steps)}%`;
    bar.setAttribute('aria-valuemax', run.num_steps);
    bar.setAttribute('aria-valuenow', state.step);
  }
  const best = data.evals.find(e => e.best) || data.evals.at(-1);
  const tile = (name, value, more = '') => el('div', {}, el('dt', { textContent: name }),
    el('dd', {}, value, el('small', { textContent: more })));
  byId('tiles').replaceChildren(
    tile('Step', whole(state.step), run.num_steps ? ` of ${short(run.num_steps, 4)}` : ''),
    tile('Tokens', short(state.tokens), state.epoch ? ` epoch ${state.epoch + 1}` : ''),
    tile('Training loss', state.loss === null ? '–' : loss(state.loss)),
    tile('Bits per byte, best', best && best.bits_per_byte !== null ? best.bits_per_byte.toFixed(4) : '–', best ? ` at ${short(best.step, 4)}` : ''),
    tile('Tokens a second', short(state.tokens_per_second)),
    tile('MFU', percent(state.mfu)),
    tile('Elapsed', span(state.elapsed)),
    tile('Left', state.ended ? '–' : span(state.left)));
}

const curve = (set, name) => set.curves.find(c => c.name === name);
const line = (set, name, color, label, more = {}) => {
  const found = curve(set, name);
  return found && found.mean.some(v => v !== null) ? [{ name: label, color, x: set, y: found.mean, min: found.min, max: found.max, ...more }] : [];
};
const raw = (name, color, label) => line(data.scalars, name, color, label).flatMap(s => view.smooth === 0 ? [s]
  : [{ ...s, faint: true, hide: true }, { ...s, min: null, max: null, y: smoothed(s.y, view.smooth) }]);
const evaluated = (name, color, of) => data.evals.length
  ? [{ name, color, dots: true, x: { step: data.evals.map(e => e.step), tokens: data.evals.map(e => e.tokens) }, y: data.evals.map(of) }] : [];
const modules = () => data.scalars.curves.filter(c => c.name.startsWith('mtp')).map(c => c.name);
// Layers are ordered, and so are their colours.
const perLayer = set => set.curves.map((c, i) => {
  const t = set.curves.length > 1 ? i / (set.curves.length - 1) : 1;
  return { name: c.name.replace('layer ', ''), color: `rgb(${mix(rgb(css('--ramp-from')), rgb(css('--ramp-to')), t).map(Math.round)})`, x: set, y: c.mean };
});
const marks = () => data.refused.map(step => view.x === 'step' ? step : data.scalars.tokens[nearest(data.scalars.step, step)]);

function section(title, about) {
  const grid = el('div', { className: 'grid' });
  byId('main').append(...(title ? [el('h2', { textContent: title })] : []), ...(about ? [about] : []), grid);
  return grid;
}

function build() {
  charts.length = 0;
  byId('main').replaceChildren();
  const top = section();
  const averaged = data.scalars.width > 1 ? `points of ${whole(data.scalars.width)} steps` : '';
  lineChart(top, { title: 'Loss', about: ['nats a token', averaged, data.refused.length && '▲ step refused'].filter(Boolean).join(', '), size: 'wide', height: 300, log: true, format: loss, marks,
    series: () => [...raw('main', css('--c0'), 'training'), ...evaluated('evaluation', css('--c1'), e => e.loss)] });
  lineChart(top, { title: 'Bits per byte', about: 'held-out text', height: 300, log: true, format: loss,
    series: () => evaluated('evaluation', css('--c1'), e => e.bits_per_byte) });
  const rest = section('Training');
  if (modules().length) lineChart(rest, { title: 'Prediction modules', about: 'nats a token', log: true, format: loss,
    series: () => modules().flatMap((name, i) => [...raw(name, css(`--c${2 + i % 4}`), `module ${i + 1}`),
      ...evaluated(`evaluation ${i + 1}`, css(`--c${2 + i % 4}`), e => e.mtp[i] ?? null)]) });
  lineChart(rest, { title: 'Gradient norm', about: 'before clipping', log: true, marks, series: () => raw('grad_norm', css('--c0'), 'norm') });
  lineChart(rest, { title: 'Learning rate', zero: true, series: () => line(data.scalars, 'lr', css('--c0'), 'rate') });
  lineChart(rest, { title: 'Tokens a second', zero: true, series: () => raw('tokens_per_second', css('--c0'), 'tokens/s') });
  const busy = () => [...raw('mfu', css('--c0'), 'MFU'), ...line(data.scalars, 'waiting', css('--c1'), 'waiting for data')];
  lineChart(rest, { title: 'Use of the device', about: 'share of its peak, and of time', zero: true, format: percent, tick: t => short(100 * t) + '%', series: busy });
  if (data.load.layers.length) lineChart(rest, { title: 'Balance loss', series: () => raw('balance', css('--c0'), 'balance') });
  if (data.load.layers.length) {
    const scale = el('div', { className: 'scale' }, '¼ or less', el('i'), '4 times an equal share or more');
    const maps = section('Expert load', scale);
    data.load.layers.forEach((_, layer) => heatMap(maps, layer));
  }
  const lines = data.violation.curves.length + data.logits.curves.length ? section('Layers') : null;
  if (data.violation.curves.length) lineChart(lines, { title: 'Largest expert load', about: 'over the mean, less 1', size: 'half', zero: true, series: () => perLayer(data.violation) });
  if (data.logits.curves.length) lineChart(lines, { title: 'Largest attention logit', about: 'by attention layer', size: 'half', series: () => perLayer(data.logits) });
  texts();
  redraw();
}

function texts() {
  const open = kept.get('open') || {}, written = byId('written'), events = byId('events');
  written.hidden = !data.written.length;
  const steps = data.written.map(({ step, samples }, i) => {
    const eval_ = data.evals.find(e => e.step === step);
    const made = el('details', { open: open[step] ?? i === 0 },
      el('summary', {}, `Step ${whole(step)}`, el('small', { textContent: eval_ && eval_.bits_per_byte !== null ? `${eval_.bits_per_byte.toFixed(3)} bits per byte` : '' })),
      // Text and nothing else: what a model writes is not to be trusted.
      ...samples.map(s => el('pre', { className: 'sample' }, el('span', { className: 'given', textContent: s.prompt }), s.text)));
    made.addEventListener('toggle', () => kept.set('open', { ...kept.get('open'), [step]: made.open }));
    return made;
  });
  const latest = steps.splice(0, steps.length > 6 ? 4 : 6);
  written.replaceChildren(written.firstElementChild, ...latest);
  if (steps.length) {
    const more = el('details', { className: 'more', open: kept.get('more') || false }, el('summary', { textContent: `${steps.length} earlier` }), ...steps);
    more.addEventListener('toggle', event => { if (event.target === more) kept.set('more', more.open); });
    written.append(more);
  }
  events.hidden = !data.notes.length;
  const earlier = data.notes_dropped ? [el('li', {}, el('span', { className: 'text', textContent: `and ${data.notes_dropped} earlier` }))] : [];
  events.querySelector('ol').replaceChildren(...data.notes.map(n => el('li', {},
    el('span', { className: 'at', textContent: `step ${whole(n.step)}` }),
    el('time', { dateTime: new Date(n.time * 1000).toISOString(), textContent: new Date(n.time * 1000).toISOString().slice(0, 16).replace('T', ' ') }),
    el('span', { className: 'text', textContent: n.text }))), ...earlier);
}

function zoom(range) {
  view.range = range;
  byId('reset').hidden = !range;
  keep();
  redraw();
}
const keep = () => kept.set('view', { ...view, at: null });

function controls() {
  Object.assign(view, kept.get('view') || {}, { at: null });
  byId('controls').hidden = false;
  for (const input of document.querySelectorAll('#controls input[type=radio]')) {
    input.checked = view[input.name] === input.value;
    input.addEventListener('change', () => {
      view[input.name] = input.value;
      if (input.name === 'x') zoom(null);
      keep();
      redraw();
    });
  }
  byId('smooth').value = view.smooth;
  byId('smooth').addEventListener('input', event => { view.smooth = +event.target.value; keep(); redraw(); });
  byId('reset').hidden = !view.range;
  byId('reset').addEventListener('click', () => zoom(null));
  const values = byId('values');
  values.open = kept.get('values') ?? false;
  values.addEventListener('toggle', () => kept.set('values', values.open));
}

// Keeps up with the run: from a server the page is read again and its data exchanged; from a disk, where a page may not
// read files, it is loaded again. Not while someone reads a chart or has chosen text, nor behind other windows.
let paused = kept.get('paused') || false;
function follow() {
  const button = byId('pause');
  button.hidden = data.state.ended;
  if (data.state.ended) return;
  button.textContent = paused ? 'Follow the run' : 'Pause updates';
  button.setAttribute('aria-pressed', paused);
  setTimeout(async () => {
    header();
    if (!paused && !document.hidden && view.at === null && getSelection().isCollapsed) await update();
    follow();
  }, silent() ? 60000 : 15000);
}
async function update() {
  if (!location.protocol.startsWith('http')) return location.reload();
  try {
    const page = new DOMParser().parseFromString(await (await fetch(location.href, { cache: 'no-store' })).text(), 'text/html');
    data = JSON.parse(page.getElementById('data').textContent);
    byId('latest').replaceWith(page.getElementById('latest'));
    const y = scrollY;
    header();
    build();
    scrollTo(0, y);
  } catch { /* The server is away, or the page is being written: the next time will do. */ }
}
byId('pause').addEventListener('click', () => {
  paused = !paused;
  kept.set('paused', paused);
  byId('pause').textContent = paused ? 'Follow the run' : 'Pause updates';
  byId('pause').setAttribute('aria-pressed', paused);
});

controls();
header();
build();
scrollTo(0, kept.get('scroll') || 0);
addEventListener('pagehide', () => kept.set('scroll', scrollY));
addEventListener('resize', redraw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
follow();
