"""Graphs: Inductor presets (`inductor`), device graph capture (`capture`), graph breaks (`breaks`)."""
