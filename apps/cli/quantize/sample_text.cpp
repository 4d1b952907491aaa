#include "quantize/sample_text.h"

namespace millrace::cli {

const char* const kSampleText =
    "The ferry left at seven, as it had every morning since the bridge came down. Anna stood at the rail "
    "with a "
    "paper cup of coffee and watched the town grow small. She had promised her brother that she would write, "
    "and she had promised herself that she would not. \"You'll be back before the apples are ripe,\" he had "
    "said, and she had laughed, because it was March and snow still lay in the shade of the boathouse.\n\n"
    "Why does a metal spoon feel colder than a wooden one, when both have been lying on the same table? "
    "Their "
    "temperature is the same. What differs is how quickly each of them carries heat away from your fingers: "
    "metal conducts it well, so the skin cools, while wood conducts it badly and soon feels warm. The nerves "
    "in "
    "your hand do not measure the temperature of the spoon; they measure the temperature of the skin.\n\n"
    "To change a bicycle tyre you need two levers, a pump and a new tube.\n"
    "1. Take the wheel out and let the rest of the air escape.\n"
    "2. Lift one side of the tyre over the rim with the levers and pull the old tube out.\n"
    "3. Feel along the inside of the tyre for glass or thorns.\n"
    "4. Put the new tube in, press the tyre back with your thumbs, and pump it up slowly.\n\n"
    "def average(values):\n"
    "    if not values:\n"
    "        return 0.0\n"
    "    return sum(values) / len(values)\n\n"
    "In 1912 the village had 340 inhabitants; by 1950 there were 1,275 of them, almost four times as many, "
    "and "
    "most of the newcomers worked at the paper mill on the other side of the river. The school, which had "
    "been "
    "built for sixty children, was extended twice. Today the mill is a museum, the river is clean enough to "
    "swim "
    "in, and the government of the province pays for a bus that runs every half hour.";

}  // namespace millrace::cli
