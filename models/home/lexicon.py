"""Ordinary English words that serve as names, things and places in training.

They give the tokenizer its pieces, and train the copying of every piece between any two places. No held-out entity is
among them, which a test checks.
"""

_TEXT = """
    acorn actor adder album alley almond amber anchor angle animal ankle answer anthem apple april arch arena argument
    army arrow artist ash atlas august aunt author autumn avenue award badge badger bagel ballet balloon bamboo banana
    banjo banner barley barn baron barrel basin bat bath bay beach bead beam bean bear beard beaver bee beetle bell belt
    berry bible bird biscuit bishop bison blade blossom board boat body bolt bone bonnet border bottom boulder bow brain
    branch brass bread breeze brick bride brook brother bubble buckle bud buffalo bugle builder bulb bull bundle bunny
    burger bush butler butter button cactus cage calf camel camp canal canary candy cannon canoe canvas canyon captain
    caravan carbon card cargo carpet carrot cart carton cartoon case cashew castor cat cattle cave cedar cello cement
    century cereal chain chalk chamber champion channel chapel chapter chart cheese chef chemist cherry chestnut chicken
    chief child chimney chin chocolate choir cider circle circus city clay cliff clinic cloak cloth cloud clover clown
    coach coal coast coat cobra cocoa coffee collar colony column comet company copper coral cork corn corner cotton
    couch council country county courage cousin cow cowboy crab cradle craft crane crater cream creek crew cricket crow
    crown crumb crystal cube cucumber culture curry curve custard customer cycle daisy dance danger daughter dawn deer
    degree delta dentist desert design detail diamond diary diesel digit dinghy dinosaur diploma dirt dish doctor dollar
    dolphin domino donkey double dove dragon drama drawing dream dress drift driver drum duchess duck duke dune eagle
    earth east echo edge eel effect egg elbow elephant elevator elm ember emerald engine engineer envelope equator
    evening exhibit fabric face factory fairy falcon family farm farmer father feather fence fern fever fiddle field fig
    finger fir fire fish flag flame flamingo flavour fleet flint flood floor flour flute fly foam fog folder folk food
    foot forest fortune fossil fox frame freezer friend frog frost fruit fuel funnel galaxy gallery galley gander gang
    gate gazelle gem general ghost giant ginger giraffe girl glacier glass glider globe glory glow goat gold goose grain
    granite grape graph grass gravel gravy grease guest guide gull gutter habit hail hair half hall halo ham hand handle
    harbour hare harp harvest hawk hay hazel head heart heath heather hedge heel heron herring hill hinge hip history
    hive hobby holly honey hood hook horn horse hotel hound house human hunter hurdle ice iguana image inch index ink
    inn insect island ivory ivy jackal jade jaguar jam jasper jaw jazz jelly jewel jockey joint joke journal judge jug
    juice july jumper june jungle junior jury kangaroo kayak kernel ketchup kid kidney kilo king kingdom kiosk kiss kit
    kitten kiwi knee knight knot koala label lace lad lady lagoon lake lamb land lane lark laser lava lawn lawyer layer
    leaf leather lemonade lentil leopard lesson letter lettuce level liberty lid light lilac lily lime line linen lion
    liquid lizard llama loaf lobster lodge log lord lotion lotus lumber lunch lung lynx magnet magpie maid mail major
    mallet mammoth mango mansion maple marble march margin marina market maroon marsh mask mason master matter meadow
    meal meat medal melody melon member mercury merit message metal meteor method middle midnight mile milk mill mineral
    minister mint minute mirage mist mitten moat model mole moment monarch money monk monkey month moon moose morning
    moss motel moth mother motor mountain mouse mouth movie mud muffin mule muscle mushroom music mustard myth nail
    napkin nation nature navy neck nectar needle neon nephew nest nettle network newt nickel niece night noble noise
    noodle noon north nose note nougat nugget number nurse nut nutmeg oak oar oasis oat object ocean octopus office oil
    olive onion opal orbit orchard orchid order organ ornament ostrich otter oval owl owner oxen oxygen oyster package
    page palace palm panda panel panther papaya paper parade parcel parrot parsley party pasta pastry patch path patrol
    pavement paw peach peacock peanut pearl pebble pedal pelican pen pencil penguin penny pepper perch perfume petal
    phoenix pickle picture pie pier pig pigeon pilot pine pink pipe pirate pistachio pizza plain planet plank plant
    plasma plateau platform platter plaza plot plough plum plumber pocket poem poet point pole police pollen polo pond
    pony poplar poppy porch porridge port portrait postcard potato potter powder prairie prawn present prince princess
    prism prize profit project propeller pudding puffin pulse pumpkin puppet puppy purse puzzle pyramid quail quarry
    quarter quartz queen question quill quilt rabbit raccoon radar radish raft rain rainbow raisin ram ranch ranger
    raven ray reader record reed reef reindeer relay relic reptile rescue resin rhubarb ribbon rice rider ridge rifle
    ring ripple river road robin robot rock rocket rod roll roof rook root rose rowing ruby ruler rumble runner rust
    rye saddle safari saffron sage sail sailor salad salmon saloon salt sand sandal sardine satin sauce sausage scallop
    scarecrow scene school science scorpion scout screen scribe sea seal season seed senate sequel servant sesame shadow
    shark sheep sheet shell shepherd sheriff shield ship shirt shoe shop shore shrimp shuttle sign silk silver singer
    siren sister ski skin skirt skunk sky slate sleeve slope sloth smile smoke snail snake snow soccer soda soil soldier
    sonnet soup south spade spark sparrow spear sphere spice spider spinach spiral spirit sponge spring spruce square
    squid squirrel stable stadium stage stallion star statue steam steel stem step stew stick stone stork storm story
    stove stranger straw stream street string sugar suit sultan summer summit sun sunset surf surgeon swallow
    swamp swan sweater swift sword symbol syrup tail tailor tale talent tango tank tape target tart taxi tea teacher
    team temple tennis tenor terrier thimble thistle thorn thread throne thumb thunder tide tiger tile timber tin tinsel
    title toad toast tobacco toffee tomato tongue tooth topaz torpedo tortoise tourist tower town toy track tractor
    trade trail train treasure treaty tree tribe trick trolley trout truck truffle tulip tuna tundra tunnel turban
    turbine turkey turnip turtle twig twin typhoon uncle unicorn uniform union valley vampire vanilla vapour vault
    velvet vessel victory village vinegar vine violet viper visitor voice volcano vowel voyage vulture wafer wagon
    waiter wall walnut walrus waltz wand warrior wasp water wave wax weasel weather web weed week weight west whale
    wheat wheel whip whisper whistle widow willow wind wine wing winter wire wizard wolf woman wonder wood wool worker
    world worm wreath wren wrist writer yacht yard yarn year yeast yolk zebra zenith zinc zipper
"""
WORDS = tuple(_TEXT.split())

_LONG = """
    accordion albatross alligator almanac ambulance anchovy anteater antelope apricot archway artichoke asparagus
    asphalt asteroid avocado backyard bagpipe ballpoint bandana barometer bassoon bathrobe beanstalk bedspread
    beehive binocular birdcage blackbird blackboard bluebell blueberry bookshelf bowstring bracelet breadboard
    briefcase broccoli broomstick buttercup butterfly cabbage calendar cantaloupe caravanner cardigan carnation
    cartwheel caterpillar catfish cauliflower cellophane centipede chandelier checkerboard chimpanzee chipmunk
    chrysalis cinnamon clarinet cloakwork clockwork clothesline cobweb cockatoo coconut colander compost condor
    copperhead coriander cornflower cottontail cranberry crocodile croissant crossbow crossword cupboardful cyclone
    daffodil dandelion dashboard daybreak dewdrop dragonfly dragonfruit drawbridge driftwood drumstick duckling
    dumpling earthworm eggplant eggshell elderberry embroidery evergreen eyeglass farmhouse featherbed figurine
    firefly fireplace fisherman flagpole flapjack floorboard flowerpot flytrap footbridge footpath foxglove
    frostbite fruitcake gargoyle garlic gazebo geranium gingerbread gladiolus goldfinch goldfish gondola gooseberry
    grapefruit grapevine grasshopper greenhouse groundhog guidebook gumdrop hacksaw hairbrush hairpin hamster
    handbag handlebar hardwood harmonium hawthorn haystack hazelnut headband headlight hedgehog helicopter hemlock
    hibiscus highchair hillside hippopotamus honeycomb honeydew horseshoe houseboat hummingbird hyacinth hydrant
    iceberg icicle inkwell ironwood jackdaw jasmine jellyfish jigsaw juniper kettledrum keyhole kingfisher
    kitchenette kumquat ladybird lampshade landmark lavender lawnmower leapfrog lemongrass leotard lifeboat
    lighthousekeeper limestone lobelia locket lollipop loudspeaker lullaby magnolia mahogany mandarin mandolin
    marigold marmalade marshmallow meadowlark melodica meringue milestone millipede mistletoe moccasin mongoose
    moonbeam moonstone mosaic mosquito motorboat mulberry mushroomcap nectarine nightingale notebook nutcracker
    oatmeal obelisk observatory omelette orangeade orangutan oregano ornithology overcoat paintbrush pancake
    paperback paperweight parachute paragraph parakeet parsnip passport pavilion peppermint periscope persimmon
    petunia pineapple pinwheel pistachioshell pocketknife pomegranate ponytail porcelain porcupine postbox pothole
    primrose printingpress pumpernickel quicksand quicksilver raincloud raindrop raspberry rattlesnake rhinoceros
    riverbank roadside rosebud rosemary rowboat sailboat salamander sandcastle sandpaper sandstone satchel sawdust
    scarecrowhat scoreboard seagull seahorse seashell seaweed shamrock shipwreck shoelace shortbread sidewalk
    signpost silkworm skateboard skyscraper snowball snowdrop snowflake snowman songbird spaceship spearmint
    speedboat spiderweb spoonful springboard spyglass stairwell starfish steamboat stepladder stopwatch storybook
    strawberry streetlamp submarine sugarcane sunbeam sundial sunflower sunhat surfboard sweetcorn swordfish
    tablespoon tadpole tambourine tangerine tapestry teaspoon telegram terracotta thunderstorm toadstool toothbrush
    toothpick torchlight treehouse trombone tuberose turmeric turquoise typewriter ukulele umbrella vineyard viola
    volleyball wallflower wallpaper watercress waterfall watermelon weathervane whirlpool whirlwind wildflower
    windmill windowsill wintergreen wishbone woodland woodpecker workbench wristwatch xylophone yellowhammer
    zeppelin
"""
LONG = tuple(_LONG.split())
"""Words that the tokenizer cuts into several pieces, like most held-out ones."""
