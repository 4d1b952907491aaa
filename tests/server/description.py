"""Holds answers to what /openapi.json says of them: the status must be described, and the body must fit its schema.

The validator is jsonschema from PyPI, kept in build/python/jsonschema.
"""

import re
from urllib.parse import urlsplit


class Description:
    def __init__(self, document):
        from jsonschema import Draft202012Validator
        self.document, self.validators, self.checked = document, {}, set()
        self.make = Draft202012Validator
        self.paths = [(re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), operations)
                      for path, operations in document["paths"].items()]

    def check(self, method, target, status, kind, body):
        """Raises AssertionError when the answer is not as described; paths that are not described are not looked at."""
        path = urlsplit(target).path
        operation = next((operations.get(method.lower()) for pattern, operations in self.paths if pattern.fullmatch(path)), None)
        if operation is None:
            return
        described = operation["responses"].get(str(status))
        assert described is not None, f"{method} {path}: status {status} is not described"
        described = self.resolve(described)
        kind = kind.split(";")[0]
        content = described.get("content", {}).get(kind)
        assert content is not None, f"{method} {path}: {status} as {kind!r} is not described"
        key = (method, path, status)
        if key not in self.validators:
            self.validators[key] = self.make({**content["schema"], "components": self.document["components"]})
        for error in self.validators[key].iter_errors(body):
            raise AssertionError(f"{method} {path}: {status}: {error.json_path}: {error.message}")
        self.checked.add(key)

    def resolve(self, value):
        while "$ref" in value:
            found = self.document
            for name in value["$ref"].removeprefix("#/").split("/"):
                found = found[name]
            value = found
        return value
