"""Headers of the Standard Webhooks specification: id, time and HMAC-SHA256 of a delivery."""

import base64
import hashlib
import hmac
import secrets

from service.wire.webhooks import SECRET_PREFIX, secret_key

NEW_SECRET_BYTES = 32


def new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(NEW_SECRET_BYTES)).decode()


def signed_headers(secret: str, delivery_id: str, time_s: int, body: bytes) -> dict[str, str]:
    """Headers that show a receiver with the same secret who sent `body`, and when."""
    key = secret_key(secret)
    assert key is not None, "checked when it was stored"
    content = b"%s.%d.%s" % (delivery_id.encode(), time_s, body)
    signature = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(time_s),
        "webhook-signature": f"v1,{signature}",
    }  # fmt: skip
