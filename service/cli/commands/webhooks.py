"""`webhooks`: who is told of jobs' events over HTTP."""

from typing import Annotated, Any

import typer

from service.cli.options import AsJson, Url

DEFAULT_ROWS = 20
Webhook = Annotated[str, typer.Argument(metavar="NAME", help="The webhook's name or id.")]
app = typer.Typer(name="webhooks", no_args_is_help=True, help="Send jobs' events to URLs, signed, or to Slack.")


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, for `notify` of a job and other commands.")],
    to: Annotated[str, typer.Argument(metavar="RECEIVER", help="The http or https URL that gets the events.")],
    format: Annotated[str, typer.Option(metavar="json|slack", help="Form of the messages.")] = "json",
    event: Annotated[
        list[str] | None,
        typer.Option("--event", metavar="TYPE", help="job.state or job.checkpoint; repeat for both. [job.state]"),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help="Only changes to this state; repeat for several. [every state]"),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY=VALUE", help="Only jobs with this label; repeat to require several."),
    ] = None,
    named: Annotated[bool, typer.Option("--named", help="Only jobs that name it in `notify`.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Add a webhook, and print the key of its signatures.

    The key is not shown again. Test the receiver with 'shardyard webhooks test NAME'.
    """
    from service.cli.server import connect
    from service.cli.view.output import print_json

    options: dict[str, Any] = {"format": format, "jobs": "named" if named else "all"}
    options |= {key: value for key, value in (("events", event), ("states", state), ("labels", label)) if value}
    with connect(url) as client:
        webhook = client.webhooks.add(name, to, **options)
    if as_json:
        print_json(webhook)
        return
    print(f"{webhook['id']} ({webhook['name']}) gets {', '.join(webhook['events'])} at {webhook['url']}")
    if format == "json":
        print(f"secret, not shown again: {webhook['secret']}")


@app.command()
def ls(url: Url = None, as_json: AsJson = False) -> None:
    """List the webhooks."""
    from service.cli.server import connect
    from service.cli.view.listing import print_listing
    from service.cli.view.output import columns_of, console, print_json, say
    from service.cli.view.webhooks import webhook_columns

    with connect(url) as client:
        webhooks = client.webhooks.list()
    if as_json:
        print_json({"items": webhooks})
    elif not webhooks:
        say("no webhooks yet; add one with 'shardyard webhooks add NAME URL'")
    else:
        out = console()
        print_listing(webhook_columns(webhooks), out, columns_of(out))


@app.command()
def rm(name: Webhook, url: Url = None, as_json: AsJson = False) -> None:
    """Remove a webhook with its log.

    What it has not been sent yet is dropped.
    """
    from service.cli.server import connect
    from service.cli.view.output import print_json

    with connect(url) as client:
        webhook = client.webhooks.remove(name)
    if as_json:
        print_json(webhook)
    else:
        print(f"removed {webhook['name']}")


@app.command()
def enable(name: Webhook, url: Url = None, as_json: AsJson = False) -> None:
    """Send events to a disabled webhook again."""
    from service.cli.server import connect

    with connect(url) as client:
        _print_webhook(client.webhooks.enable(name), as_json)


@app.command()
def disable(name: Webhook, url: Url = None, as_json: AsJson = False) -> None:
    """Send no further events to a webhook, until it is enabled."""
    from service.cli.server import connect

    with connect(url) as client:
        _print_webhook(client.webhooks.disable(name), as_json)


def _print_webhook(webhook: dict[str, Any], as_json: bool) -> None:
    from service.cli.view.output import print_json

    if as_json:
        print_json(webhook)
    else:
        print(f"{webhook['name']} is {'enabled' if webhook['enabled'] else 'disabled'}")


@app.command("test")
def send_test(name: Webhook, url: Url = None, as_json: AsJson = False) -> None:
    """Send a test event now.

    Exits with 1 if the receiver does not accept it.
    """
    from service.cli.failures import FAILED
    from service.cli.server import connect
    from service.cli.view.output import print_json
    from service.cli.view.webhooks import outcome

    with connect(url) as client:
        delivery = client.webhooks.test(name)
    if as_json:
        print_json(delivery)
    else:
        print(f"{delivery['id']} {delivery['state']}: {outcome(delivery)}")
    if delivery["state"] != "delivered":
        raise typer.Exit(FAILED)


@app.command()
def deliveries(
    name: Webhook,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="Only those that are pending, delivered or failed.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most deliveries.")] = DEFAULT_ROWS,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List what a webhook was sent, newest first."""
    from service.cli.server import connect
    from service.cli.view.listing import print_listing
    from service.cli.view.output import columns_of, console, print_json, say
    from service.cli.view.webhooks import delivery_columns

    with connect(url) as client:
        items = list(client.webhooks.deliveries(name, state, limit))
    if as_json:
        print_json({"items": items})
    elif not items:
        say("nothing was sent yet")
    else:
        out = console()
        print_listing(delivery_columns(items), out, columns_of(out))


@app.command()
def repeat(
    name: Webhook,
    delivery: Annotated[str, typer.Argument(metavar="DELIVERY", help="The delivery's id.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Send a delivery again.

    It has the same id and body, so that a receiver that has it already can tell.
    """
    from service.cli.server import connect
    from service.cli.view.output import print_json

    with connect(url) as client:
        result = client.webhooks.repeat(name, delivery)
    if as_json:
        print_json(result)
    else:
        print(f"{result['id']} is {result['state']}")
