"""Pictures as SVG text: the scales, the style and the plots that every picture of dynaplan is made of."""
