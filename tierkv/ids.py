"""The names of things, as types. See ``docs/keys.md``.

A ``BlockHash`` says which tokens, a ``BlockKey`` says which bytes. A ``FamilyId`` is the store's own small integer
for one (namespace, hash); it is reused after the family is gone, which is why handles also carry a generation.
"""

from __future__ import annotations

from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: names a prefix of tokens that ends with this block, inside a namespace."""

NamespaceDigest = NewType("NamespaceDigest", bytes)
"""32 bytes: everything that changes the bytes of a block or who may see them, except the part."""

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: tenant tag (4), namespace tag (8), digest of namespace, hash and part (20)."""

KeyPrefix = NewType("KeyPrefix", bytes)
"""The first 0 (everything), 4 (a tenant) or 12 (a namespace) bytes of block keys."""

FamilyId = NewType("FamilyId", int)
Slot = NewType("Slot", int)

HASH_BYTES = 32
KEY_BYTES = 32
TENANT_TAG_BYTES = 4
NAMESPACE_TAG_BYTES = 8
NAMESPACE_PREFIX_BYTES = TENANT_TAG_BYTES + NAMESPACE_TAG_BYTES

EVERYTHING = KeyPrefix(b"")
