"""What a fit can be kept from seeing when it is scored."""

FOLDS = ("family", "model", "system")
FOLDS_HELP = "predict each family (model, system, engine), model or system by a fit to the others; as shipped if absent"
