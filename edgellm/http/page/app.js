// The page as an app that can be installed: a worker keeps its files. Browsers allow that over loopback, and where they
// trust the server's certificate.

export async function startApp() {
  try {
    await navigator.serviceWorker.register("/page/worker.js", { scope: "/" });
    const { active } = await navigator.serviceWorker.ready;
    const loaded = performance.getEntriesByType("resource").map((one) => new URL(one.name).pathname);
    active.postMessage(["/", "/page/icon.png", "/page/app.webmanifest", ...loaded.filter((path) => path.startsWith("/page/"))]);
  } catch { /* no secure context: the page is one all the same */ }
}
