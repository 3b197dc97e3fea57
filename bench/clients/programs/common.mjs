// What the programs of clients for Node share.
export const [URL_, MODEL, CALLER_URL] = process.argv.slice(2);
export const QUESTION = "The film night is on Friday at 20:00.\n\nWhen is the film night?";
export const WEATHER = "How is the weather in Bern?";

export function check(fact, what) {
  if (!fact) throw new Error(`not as expected: ${JSON.stringify(what)}`);
}

export async function run(features) {
  for (const [feature, attempt] of Object.entries(features)) {
    let outcome = "works";
    let detail = "";
    try {
      await attempt();
    } catch (error) {
      outcome = [400, 404].includes(error.status) ? "refused" : "fails";
      detail = `${error.name}: ${error.message}`.slice(0, 300);
    }
    console.log(JSON.stringify({ feature, outcome, detail }));
  }
}
