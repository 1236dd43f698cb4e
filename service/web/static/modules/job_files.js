// Files of a checkpoint, with their checksums, to download, and their verification.

import { get, post } from "./api.js";
import { number, size } from "./format.js";
import { toast } from "./page.js";

export function startFiles(jobId) {
  const dialog = document.getElementById("files");
  const result = document.getElementById("verification");
  let verifying = null;
  dialog.addEventListener("close", () => verifying?.abort());
  document.getElementById("checkpoints").addEventListener("click", async ({ target }) => {
    const name = target.dataset?.files ?? target.dataset?.verify;
    if (!name) return;
    target.disabled = true;
    try {
      const { items } = await get(`/v1/jobs/${jobId}/files`, { kind: "checkpoints", limit: 10_000 });
      const own = items.filter(({ path }) => path.includes(`/${name}/`));
      document.getElementById("files-title").textContent = `Files of ${name}`;
      document.getElementById("files-table").replaceChildren(table(jobId, own));
      result.replaceChildren();
      dialog.showModal();
    } catch (error) {
      toast(error.message);
      return;
    } finally {
      target.disabled = false;
    }
    if (!target.dataset.verify) return;
    verifying = new AbortController();
    showBusy(result, target.dataset.size);
    try {
      const path = `/v1/jobs/${jobId}/checkpoints/${name}/verification`;
      showVerification(result, await post(path, undefined, { signal: verifying.signal }));
    } catch (error) {
      if (error.name !== "AbortError") show(result, "error", error.message);
    }
  });
}

function showVerification(result, { num_files, num_bytes, faults }) {
  const files = `${number(num_files)} ${num_files === 1 ? "file" : "files"}`;
  if (!faults.length) return show(result, "success", `Intact: ${files}, ${size(num_bytes)}, match the marker.`);
  show(result, "error", `Damaged: ${number(faults.length)} of ${files}. ${faults[0].remedy}.`);
  const list = Object.assign(document.createElement("ul"), { className: "plain" });
  for (const { path, rule } of faults) {
    list.append(Object.assign(document.createElement("li"), { textContent: `${path} ${rule}` }));
  }
  result.append(list);
}

// Nobody knows how far the service is: it answers when it has read all.
function showBusy(result, bytes) {
  show(result, "info", `Reading ${bytes || "all files"} to compare them with the marker; closing this ends it …`);
  result.firstElementChild.append(Object.assign(document.createElement("progress"), { ariaLabel: "verification" }));
}

function show(result, kind, text) {
  const notice = Object.assign(document.createElement("p"), { className: "notice", textContent: text });
  notice.dataset.kind = kind;
  result.replaceChildren(notice);
}

function table(jobId, files) {
  const table = Object.assign(document.createElement("table"), { className: "table" });
  const head = table.createTHead().insertRow();
  for (const name of ["File", "Size", "SHA-256"]) {
    head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: name }));
  }
  const body = table.createTBody();
  for (const { path, size_bytes, sha256 } of files) {
    const row = body.insertRow();
    const link = Object.assign(document.createElement("a"), {
      href: `/v1/jobs/${jobId}/files/${path.split("/").map(encodeURIComponent).join("/")}`,
      textContent: path.split("/").at(-1), download: path.split("/").at(-1),
    });
    row.insertCell().append(link);
    const cell = row.insertCell();
    cell.className = "number";
    cell.textContent = size(size_bytes);
    Object.assign(row.insertCell(), { className: "code", textContent: sha256 ?? "–" });
  }
  return table;
}
