"""What runs beside the layer: the cost model, `sonicmoe doctor`, and compilation ahead of time."""
