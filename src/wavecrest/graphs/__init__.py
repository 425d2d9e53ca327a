"""Graphs: Inductor presets (`inductor`), device graph capture (`capture`), and where Dynamo splits a model (`breaks`)."""
