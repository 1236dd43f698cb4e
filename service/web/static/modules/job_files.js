// Files of a checkpoint, with their checksums, to download.

import { get } from "./api.js";
import { size } from "./format.js";
import { toast } from "./page.js";

export function startFiles(jobId) {
  const dialog = document.getElementById("files");
  document.getElementById("checkpoints").addEventListener("click", async ({ target }) => {
    const name = target.dataset?.files;
    if (!name) return;
    target.disabled = true;
    try {
      const { items } = await get(`/v1/jobs/${jobId}/files`, { kind: "checkpoints", limit: 10_000 });
      const own = items.filter(({ path }) => path.includes(`/${name}/`));
      document.getElementById("files-title").textContent = `Files of ${name}`;
      document.getElementById("files-table").replaceChildren(table(jobId, own));
      dialog.showModal();
    } catch (error) {
      toast(error.message);
    } finally {
      target.disabled = false;
    }
  });
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
