"""Users of the API server, and their kubeconfig files."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """User of the API server with a token.

    Attributes:
        name: user name in RBAC; `system:serviceaccount:NAMESPACE:NAME` has that account's rights.
        groups: group names in RBAC.
        token: bearer token, random for each control plane.
    """

    name: str
    groups: tuple[str, ...] = ()
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    @property
    def headers(self) -> Mapping[str, str]:
        """HTTP headers of this user's requests."""
        return {"Authorization": f"Bearer {self.token}"}


def write_token_file(path: Path, users: Mapping[str, User]) -> None:
    """Write the file for kube-apiserver's `--token-auth-file`."""
    lines = [
        f'{user.token},{user.name},{index},"{",".join(user.groups)}"\n'
        for index, user in enumerate(users.values())
    ]
    path.write_text("".join(lines))


def write_kubeconfig(path: Path, *, server: str, ca_file: Path, user: User) -> None:
    """Write a kubeconfig for one user; it is JSON, which is YAML too."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "test", "cluster": {"server": server, "certificate-authority": str(ca_file)}}
        ],
        "users": [{"name": user.name, "user": {"token": user.token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": user.name}}],
        "current-context": "test",
    }
    path.write_text(json.dumps(config, indent=2))
