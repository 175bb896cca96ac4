"""How topics lie in the state map: `docs/format.md`, section "Topics". Pure.

`mq/topic/<name>`, `mq/group/<topic>/<name>` and `mq/page/<log id>/<last id>`, both in hexadecimal, are records of
`wal.rocksmq.group`; `mq/ids` is what outlives topics.
"""

from collections.abc import Mapping

import msgspec

from wal.rocksmq.group import Group, GroupRecord, Page, Topic, TopicRecord

PREFIX = "mq/"
IDS_KEY = f"{PREFIX}ids"
LOG_ID_FIRST = 1 << 31
"""Log ids from here on are topics'; none is used twice."""
_TOPIC, _GROUP, _PAGE = f"{PREFIX}topic/", f"{PREFIX}group/", f"{PREFIX}page/"

encode = msgspec.msgpack.Encoder().encode
_decode_topic = msgspec.msgpack.Decoder(TopicRecord).decode
_decode_group = msgspec.msgpack.Decoder(GroupRecord).decode
_decode_page = msgspec.msgpack.Decoder(Page).decode


class IdsRecord(msgspec.Struct, frozen=True, array_like=True):
    """The next log id, and an id that none of a destroyed topic is above."""

    next_log_id: int = LOG_ID_FIRST
    used: int = 0


def topic_key(topic: str) -> str:
    """Return the key of a topic's record."""
    return _TOPIC + topic


def group_key(topic: str, group: str) -> str:
    """Return the key of a group's record."""
    return f"{_GROUP}{topic}/{group}"


def page_key(log_id: int, end_id: int) -> str:
    """Return the key of a page's record."""
    return f"{_PAGE}{log_id:08x}/{end_id:016x}"


def decode_records(records: Mapping[str, bytes]) -> tuple[IdsRecord, dict[str, Topic]]:
    """Return the topics that the records under `PREFIX` tell of. Raises what msgspec raises, `KeyError`, `ValueError`."""
    ids = msgspec.msgpack.decode(records[IDS_KEY], type=IdsRecord) if IDS_KEY in records else IdsRecord()
    pages: dict[int, list[Page]] = {}
    for key, value in records.items():
        if key.startswith(_PAGE):
            pages.setdefault(int(key[len(_PAGE) :].partition("/")[0], 16), []).append(_decode_page(value))
    topics: dict[str, Topic] = {}
    for key, value in records.items():
        if key.startswith(_TOPIC):
            record = _decode_topic(value)
            topics[key.removeprefix(_TOPIC)] = Topic(record, pages.get(record.log_id, ()))
    for key, value in records.items():
        if key.startswith(_GROUP):
            topic, _, group = key.removeprefix(_GROUP).partition("/")
            topics[topic].groups[group] = Group(_decode_group(value))
    return ids, topics
