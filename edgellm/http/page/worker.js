// Keeps the page's own files, so that the installed page opens while the server is away, and says so. Nothing that the
// server says of models or conversations is kept.

const KEPT = "edgellm";

addEventListener("install", () => skipWaiting());
addEventListener("activate", (event) => event.waitUntil(clients.claim()));
addEventListener("message", (event) => event.waitUntil(keep(event.data)));
addEventListener("fetch", (event) => {
  const { method, url } = event.request, { origin, pathname } = new URL(url);
  const isFile = pathname === "/" || pathname.startsWith("/page/");
  if (method === "GET" && origin === location.origin && isFile) event.respondWith(fetched(event.request, pathname));
});

// Keeps the files that were loaded before this worker was there; it renews them whenever the page fetches them.
async function keep(paths) {
  const kept = await caches.open(KEPT), known = (await kept.keys()).map((one) => new URL(one.url).pathname);
  await kept.addAll([...new Set(paths)].filter((path) => !known.includes(path)));
}

// A file as the server has it now; as it was last, where the server does not answer.
async function fetched(request, path) {
  const kept = await caches.open(KEPT);
  try {
    const answer = await fetch(request);
    if (answer.ok) await kept.put(path, answer.clone());
    return answer;
  } catch (error) {
    const found = await kept.match(path);
    if (!found) throw error;
    return found;
  }
}
