"""Settings by which a client finds the control plane: the one place that reads it from the environment."""

from pydantic import SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class ClientSettings(BaseSettings):
    """`SHARDYARD_URL` and `SHARDYARD_TOKEN`, or what stands in for them."""

    model_config = SettingsConfigDict(env_prefix="SHARDYARD_", extra="ignore", frozen=True)

    url: str = "http://127.0.0.1:8321"
    token: SecretStr | None = None
