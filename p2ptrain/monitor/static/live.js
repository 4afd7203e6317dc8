// The stream of snapshots, and its connection status.

import { byId } from "./dom.js";
import { utc } from "./formats.js";

const REFUSED_MILLISECONDS = 15_000;
const SILENT_MILLISECONDS = 45_000; // > the heartbeat interval of the server, 15 s

export function listen(onSnapshot) {
  let newest = null;
  let shown = null;
  let silence = 0;
  let source = null;

  const say = (state, text) => {
    const place = byId("connection");
    place.className = `connection ${state}`;
    place.textContent = text;
  };
  const draw = () => {
    if (document.hidden || newest === null || newest === shown) return;
    shown = newest;
    onSnapshot(newest);
  };
  const lost = () => {
    const when = newest ? `, this is of ${utc(newest.at)}` : "";
    say("lost", `Connection lost${when}; trying again`);
  };
  const watchForSilence = () => {
    clearTimeout(silence);
    silence = setTimeout(() => {
      lost();
      source.close();
      open();
    }, SILENT_MILLISECONDS);
  };
  const open = () => {
    source = new EventSource("/api/v1/stream");
    watchForSilence();
    source.addEventListener("snapshot", (event) => {
      watchForSilence();
      newest = JSON.parse(event.data);
      say("live", `Live, ${utc(newest.at)}`);
      draw();
    });
    source.addEventListener("error", () => {
      lost();
      // The browser retries unless the server refused.
      if (source.readyState === EventSource.CLOSED) {
        clearTimeout(silence);
        setTimeout(open, REFUSED_MILLISECONDS);
      }
    });
  };
  document.addEventListener("visibilitychange", draw);
  open();
}
