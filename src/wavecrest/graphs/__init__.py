"""Graphs: Inductor presets (`inductor`), device graph capture (`capture`), where Dynamo splits a model (`breaks`)."""
