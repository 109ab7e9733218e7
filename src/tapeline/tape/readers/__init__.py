"""Readers: one file per format, each from files to blocks. `READERS` has them all by name."""

from typing import Final

from tapeline.tape.readers.base import Head, Reader, Source
from tapeline.tape.readers.binance import BinanceReader, BinanceTickerReader
from tapeline.tape.readers.databento import DatabentoReader
from tapeline.tape.readers.hftbacktest import HftbacktestReader
from tapeline.tape.readers.hyperliquid import HyperliquidReader
from tapeline.tape.readers.lobster import LobsterReader
from tapeline.tape.readers.orders import OrdersReader, demo_tape
from tapeline.tape.readers.table import TableReader
from tapeline.tape.readers.tardis import TardisReader

READERS: Final[dict[str, type[Reader]]] = {
    reader.name: reader
    for reader in (
        BinanceReader,
        BinanceTickerReader,
        DatabentoReader,
        HftbacktestReader,
        HyperliquidReader,
        LobsterReader,
        OrdersReader,
        TableReader,
        TardisReader,
    )
}

__all__ = ["READERS", "Head", "Reader", "Source", "demo_tape"]
