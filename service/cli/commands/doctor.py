"""`doctor`: checks this machine for Shardyard, with remedies."""

from concurrent.futures import ThreadPoolExecutor

import typer

from service.cli.options import AsJson, StateDir, Url

MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "fault": ("fault", "bold red")}


def doctor(url: Url = None, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Check that this machine has what training needs.

    Checks Python, torch, Ray, CPUs, memory, disk, ports, the control plane, and Kubernetes where jobs run there. Exits
    with 1 if there is a fault.
    """
    from rich.table import Table
    from rich.text import Text

    from service.cli.checks import check_machine
    from service.cli.cluster_check import check_kubernetes
    from service.cli.local import settings_for
    from service.cli.view.output import console, print_json
    from service.client.settings import ClientSettings

    settings = settings_for(state_dir=state_dir)
    with ThreadPoolExecutor(1) as pool:
        pending_kubernetes = pool.submit(check_kubernetes, settings)
        findings = [*check_machine(settings, url or ClientSettings().url, state_dir), *pending_kubernetes.result()]
    if as_json:
        print_json({"findings": [finding.to_dict() for finding in findings]})
    else:
        grid = Table.grid(padding=(0, 2, 0, 0))
        for finding in findings:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            grid.add_row(Text(*MARKS[finding.verdict]), finding.what, Text(finding.detail + remedy, overflow="fold"))
        console().print(grid)
    raise typer.Exit(any(finding.verdict == "fault" for finding in findings))
