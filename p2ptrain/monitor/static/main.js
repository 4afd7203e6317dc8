// Makes the page live: each part takes over its section of the rendered page.

import { startCopying } from "./copy.js";
import { startCharts } from "./charts.js";
import { showCoverage } from "./coverage.js";
import { startGroups } from "./groups.js";
import { showHeadline } from "./headline.js";
import { startLists } from "./lists.js";
import { listen } from "./live.js";
import { startPeers } from "./peers.js";
import { showRounds } from "./rounds.js";
import { showServing } from "./serving.js";
import { startSites } from "./sites.js";

startCopying();
const notePeers = startPeers();
startCharts();
const showGroups = startGroups();
startLists();
const showSites = startSites();

listen((snapshot) => {
  showHeadline(snapshot);
  notePeers(snapshot.headline.peers);
  showCoverage(snapshot.coverage);
  showServing(snapshot.serving);
  showSites(snapshot.headline).catch(() => {}); // The last curves stay; the next snapshot asks again.
  showRounds(snapshot.rounds, snapshot.at);
  showGroups(snapshot.rounds);
});
