// What a page of another origin can try against the server at `url`. Each returns what it could read, or null.
({
  "fetch": (url, chat, body) =>
    fetch(`${url}/status`).then((r) => r.text()),
  "fetch with credentials": (url, chat, body) =>
    fetch(`${url}/v1/models`, {credentials: 'include'}).then((r) => r.text()),
  "fetch openapi": (url, chat, body) =>
    fetch(`${url}/openapi.json`).then((r) => r.text()),
  "fetch metrics": (url, chat, body) =>
    fetch(`${url}/metrics`).then((r) => r.text()),
  "fetch, no cors": (url, chat, body) =>
    fetch(`${url}/status`, {mode: 'no-cors'}).then((r) => r.text().then((t) => t || null)),
  "post json": (url, chat, body) =>
    fetch(chat, {method: 'POST', headers: {'Content-Type': 'application/json'}, body}).then((r) => r.text()),
  "post text": (url, chat, body) =>
    fetch(chat, {method: 'POST', headers: {'Content-Type': 'text/plain'}, body}).then((r) => r.text()),
  "post, no cors": (url, chat, body) =>
    fetch(chat, {method: 'POST', mode: 'no-cors', body}).then((r) => r.text().then((t) => t || null)),
  "post stream": (url, chat, body) =>
    fetch(chat, {method: 'POST', mode: 'no-cors', body: new ReadableStream(), duplex: 'half'}).then(() => null),
  "beacon": (url, chat, body) =>
    new Promise((ok) => { navigator.sendBeacon(chat, body); setTimeout(() => ok(null), 300); }),
  "keepalive": (url, chat, body) =>
    fetch(chat, {method: 'POST', mode: 'no-cors', keepalive: true, body}).then(() => null),
  "put": (url, chat, body) =>
    fetch(chat, {method: 'PUT', body}).then((r) => r.text()),
  "delete": (url, chat, body) =>
    fetch(`${url}/v1/models/x`, {method: 'DELETE'}).then((r) => r.text()),
  "key guessed": (url, chat, body) =>
    fetch(`${url}/status`, {headers: {Authorization: 'Bearer x'}}).then((r) => r.text()),
  "pair by a code": (url, chat, body, code) =>
    fetch(`${url}/phones`, {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify({code})}).then((r) => r.text()),
  "pair, no cors": (url, chat, body, code) =>
    fetch(`${url}/phones`, {method: 'POST', mode: 'no-cors', body: JSON.stringify({code})}).then(() => null),
  "XMLHttpRequest": (url, chat, body) =>
    new Promise((ok) => { const x = new XMLHttpRequest(); x.open('POST', chat);
      x.onload = () => ok(x.responseText); x.onerror = () => ok(null); x.send(body); }),
  "EventSource": (url, chat, body) =>
    new Promise((ok) => { const e = new EventSource(`${url}/status`); e.onmessage = (m) => ok(m.data);
      e.onopen = () => ok('open'); e.onerror = () => { e.close(); ok(null); }; }),
  "WebSocket": (url, chat, body) =>
    new Promise((ok) => { const w = new WebSocket(url.replace('http', 'ws') + '/status');
      w.onopen = () => ok('open'); w.onerror = () => ok(null); }),
  "script": (url, chat, body) =>
    new Promise((ok) => { const s = document.createElement('script'); s.src = `${url}/status`;
      s.onload = () => ok('loaded'); s.onerror = () => ok(null); document.body.append(s); }),
  "module": (url, chat, body) =>
    import(`${url}/page/side.js`).then((m) => JSON.stringify(m.MEANINGS)),
  "style": (url, chat, body) =>
    new Promise((ok) => { const s = document.createElement('link'); s.rel = 'stylesheet';
      s.href = `${url}/page/page.css`; s.onload = () => ok('loaded'); s.onerror = () => ok(null); document.head.append(s); }),
  "image": (url, chat, body) =>
    new Promise((ok) => { const i = new Image(); i.src = `${url}/status`;
      i.onload = () => ok('loaded'); i.onerror = () => ok(null); }),
  "frame": (url, chat, body) =>
    new Promise((ok) => { const f = document.createElement('iframe'); f.src = url; document.body.append(f);
      f.onload = () => { try { ok(f.contentDocument.querySelector('#model') ? 'read' : null); } catch { ok(null); } };
      setTimeout(() => ok(null), 2000); }),
  "form": (url, chat, body) =>
    new Promise((ok) => { const f = document.createElement('form'), t = document.createElement('iframe');
      t.name = 'sink'; f.target = 'sink'; f.method = 'POST'; f.action = chat; f.enctype = 'text/plain';
      const i = document.createElement('input'); i.name = body.slice(0, -1); i.value = '}'; f.append(i);
      document.body.append(t, f); f.submit(); setTimeout(() => ok(null), 500); }),
  "worker": (url, chat, body) =>
    new Promise((ok) => { try { const w = new Worker(`${url}/page/chat.js`); w.onerror = () => ok(null);
      w.onmessage = () => ok('runs'); setTimeout(() => ok(null), 500); } catch { ok(null); } }),
  "window": (url, chat, body) =>
    new Promise((ok) => { const w = window.open(url); if (!w) return ok(null);
      setTimeout(() => { try { ok(w.document.body.innerText || null); } catch { ok(null); } w.close(); }, 1000); }),
  "message": (url, chat, body) =>
    new Promise((ok) => { const w = window.open(url); if (!w) return ok(null); addEventListener('message', (m) => ok(m.data));
      setTimeout(() => { w.postMessage({type: 'ask', text: 'x'}, '*'); }, 500); setTimeout(() => { w.close(); ok(null); }, 1200); }),
  "length of a fetch": (url, chat, body) =>
    fetch(`${url}/status`, {mode: 'no-cors'}).then(() => { const seen = performance.getEntriesByType('resource')
      .find((one) => one.name.endsWith('/status')); return seen && seen.transferSize ? `${seen.transferSize} bytes` : null; }),
})
